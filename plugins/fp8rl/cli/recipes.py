"""Recipes that options name."""

from __future__ import annotations

from fp8rl.plugins.manager import PluginManager
from fp8rl.recipe import Recipe


def load_recipe(source: str | None, plugins: PluginManager) -> Recipe:
    recipe = Recipe.load(source) if source is not None else Recipe.from_env() or Recipe()
    plugins.is_corrector(recipe.importance_sampling.corrector)
    return recipe
