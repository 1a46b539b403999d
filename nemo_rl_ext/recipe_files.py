"""``fp8rl recipes``: where the YAMLs for NeMo RL are, in a wheel or in a clone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8rl.errors import OptionError, UnsupportedError
from fp8rl.reading import near_miss

KEYS = "keys"
"""The part that all recipes have in common, which is no config of a run."""

_USE = (
    "In a clone of NeMo RL:\n"
    "  NEMO_RL_CONFIGS=$PWD/examples/configs uv run examples/run_grpo.py \\\n"
    '      --config "$(uv run python -m fp8rl recipes NAME)"'
)


def folder() -> Path:
    """Return the folder of the recipes: in the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parent
    for found in (package / "recipes", package.parent / "recipes"):
        if (found / f"{KEYS}.yaml").is_file():
            return found
    raise UnsupportedError(
        f"The recipes are neither in '{package}' nor beside it; install fp8rl anew, or take them "
        "from its sources."
    )


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print the path of this recipe alone, for --config.")
    ] = None,
) -> None:
    """List the recipes for NeMo RL: their folder, and each with what it is for.

    A recipe lies on top of a config of NeMo RL's, which it finds through NEMO_RL_CONFIGS: the full
    path of examples/configs in a clone of NeMo RL.
    """
    place = folder()
    by_name = sorted(place.glob("*.yaml"), key=lambda file: file.stem)
    files = {file.stem: file for file in by_name if file.stem != KEYS}
    if name is None:
        typer.echo(place)
        for stem, file in files.items():
            typer.echo(f"\n{stem}\n  {_purpose(file)}")
        typer.echo(f"\n{_USE}")
        return
    stem = name.removesuffix(".yaml")
    found = files.get(stem)
    if found is None:
        close = near_miss(stem, files)
        hint = f"did you mean '{close}'?" if close else "'fp8rl recipes' lists them."
        raise OptionError(f"There is no recipe '{name}'; {hint}")
    typer.echo(found)


def _purpose(file: Path) -> str:
    """Return the comment at the head of a recipe, up to the end of its first sentence."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    sentence, _, _ = " ".join(lines).partition(". ")
    return sentence.rstrip(".") + "."
