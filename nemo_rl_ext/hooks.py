"""What nemo_rl_ext offers through fp8rl's plugin contract."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8rl import hookimpl
from fp8rl.plugins.adapters import EngineAdapter

if TYPE_CHECKING:
    import typer

    from nemo_rl_ext.grpo.importance_sampling import Corrector


@hookimpl
def register_is_correctors() -> dict[str, Corrector]:
    """Return the built-in corrector, ``is``."""
    from nemo_rl_ext.grpo.importance_sampling import correct_is

    return {"is": correct_is}


@hookimpl
def register_engine_adapters() -> list[EngineAdapter]:
    """NeMo RL, for ``fp8rl doctor nemo-rl``; it is looked at without importing it."""
    return [
        EngineAdapter(
            "nemo-rl",
            _late("examination", "diagnose"),
            examine_config=_late("examination", "examine"),
            examine_environments=_late("environments", "examine_environments"),
            recipe_of=_late("examination", "rollout_recipe"),
        )
    ]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``fp8rl recipes`` to the command line."""
    from nemo_rl_ext.recipe_files import recipes

    app.command()(recipes)


def _late(module: str, name: str) -> Any:
    """Return a function of the doctor's that imports its module, and torch, when it is called."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"nemo_rl_ext.doctor.{module}"), name)(*arguments)

    return call
