"""``fp8rl export``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from fp8rl.cli.recipes import load_recipe
from fp8rl.errors import OptionError
from fp8rl.models.folder import RECIPE_FILE
from fp8rl.plugins.manager import PluginManager
from fp8rl.recipe import RECIPE_ENV, Recipe


def add_export(app: typer.Typer, plugins: PluginManager) -> None:
    """Add the command to the command line."""

    @app.command("export")
    def export(
        checkpoint: Annotated[
            Path, typer.Argument(help="Folder of a BF16 model with safetensors.")
        ],
        out: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
        recipe: Annotated[
            str | None, typer.Option(help="Recipe file or JSON of the rollouts.")
        ] = None,
        config: Annotated[
            Path | None, typer.Option(help="YAML of NeMo RL with that recipe, instead of --recipe.")
        ] = None,
        kv_scales: Annotated[
            Path | None, typer.Option(help="JSON or safetensors file of KV scales by name.")
        ] = None,
        device: Annotated[str, typer.Option(help="Device that quantizes: cpu or cuda.")] = "cpu",
    ) -> None:
        """Write a block-FP8 checkpoint for stock vLLM and transformers.

        It is in the format that SGLang documents too (not run).

        Without --recipe and --config the recipe is CHECKPOINT's fp8rl_recipe.json, else
        FP8RL_RECIPE, else the default. KV scales come from the checkpoint or from --kv-scales.
        """
        # Here, because it imports torch.
        from fp8rl.export import check_device, plan_export, write_export

        check_device(device)
        console = Console()
        origin, loaded = _recipe_to_export(checkpoint, recipe, config, plugins)
        plan = plan_export(checkpoint, loaded, kv_scales=kv_scales, plugins=plugins)
        console.print(f"Recipe: {origin}", markup=False, soft_wrap=True)
        console.print(plan.policy.summary(), markup=False, soft_wrap=True)
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=console
        ) as bar:
            task = bar.add_task("tensors", total=plan.tensors)
            write_export(plan, out, device=device, progress=lambda tensor: bar.advance(task))
        scales = f"with {len(plan.kv_scales)}" if plan.kv_scales else "without"
        console.print(f"'{out}' is written, {scales} KV scales.", markup=False, soft_wrap=True)


def _recipe_to_export(
    checkpoint: Path, recipe: str | None, config: Path | None, plugins: PluginManager
) -> tuple[str, Recipe]:
    """Return the recipe of an export, and where it comes from."""
    if recipe is not None and config is not None:
        raise OptionError("Give --recipe or --config, not both.")
    if config is not None:
        for adapter in plugins.engine_adapters():
            if adapter.recipe_of is not None:
                return str(config), adapter.recipe_of(config)
        raise OptionError("--config needs nemo_rl_ext, which is not installed; give --recipe.")
    beside = checkpoint / RECIPE_FILE
    if recipe is None and os.path.lexists(beside):
        if not beside.is_file():
            raise OptionError(f"'{beside}' is no file; give --recipe, or remove it.")
        recipe = str(beside)
    origin = recipe or os.environ.get(RECIPE_ENV) or "default"
    return origin, load_recipe(recipe, plugins)
