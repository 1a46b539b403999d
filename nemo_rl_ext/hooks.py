"""What nemo_rl_ext offers through fp8rl's plugin contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8rl import hookimpl
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, EngineAdapter

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from fp8rl import Recipe
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
            _diagnose,
            examine_config=_examine_config,
            examine_environments=_examine_environments,
            recipe_of=_rollout_recipe,
        )
    ]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``fp8rl recipes`` to the command line."""
    from nemo_rl_ext.recipe_files import recipes

    app.command()(recipes)


def _diagnose() -> Diagnosis:
    from nemo_rl_ext.doctor.examination import diagnose  # torch comes with the patches

    return diagnose()


def _examine_config(request: ConfigRequest) -> Diagnosis:
    from nemo_rl_ext.doctor.examination import examine

    return examine(request)


def _examine_environments(source: Path | None) -> Diagnosis:
    from nemo_rl_ext.doctor.environments import examine_environments

    return examine_environments(source)


def _rollout_recipe(config: Path) -> Recipe:
    from nemo_rl_ext.doctor.examination import rollout_recipe

    return rollout_recipe(config)
