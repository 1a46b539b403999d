"""``fp8rl demo``: the whole FP8 RL loop on a CPU, with the real engines."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8rl.errors import OptionError, RecipeError

if TYPE_CHECKING:
    from fp8rl import Recipe


def demo(
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps in all.")] = 40,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe: a YAML or JSON file, or a JSON object.")
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Precisions to run: bf16, fp8-rollout, fp8, separated by commas.")
    ] = "bf16,fp8",
    out: Annotated[Path, typer.Option(help="Folder for metrics, checkpoints and report.")] = Path(
        "out/demo"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoints in --out.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data order and sampling.")] = 0,
    settings: Annotated[
        str | None, typer.Option(help="Settings as a JSON object, e.g. model or batch sizes.")
    ] = None,
) -> None:
    """Warm-start a small Qwen3 in Megatron-Core, then GRPO with rollouts in vLLM.

    Writes metrics.jsonl (one line per step), checkpoints and report.html to --out. After Ctrl-C
    the run finishes its step and writes a checkpoint and the report; --resume continues from there.
    """
    from rich.console import Console

    from fp8rl import Recipe
    from fp8rl_demo.checkpoint import latest
    from fp8rl_demo.report import terminal_table, write_report
    from fp8rl_demo.settings import DEMO_RECIPE, recipe_for
    from fp8rl_demo.supervisor import Stage, Supervisor

    console = Console()
    precisions = _precisions(compare)
    run_settings = _settings(settings, seed)
    base = Recipe.load(recipe) if recipe is not None else DEMO_RECIPE
    recipes = {precision: recipe_for(precision, base) for precision in precisions}
    for each in recipes.values():
        _check_recipe(each, run_settings.model.num_layers)
    warm_start = out / "warm-start"
    if resume and not _has_checkpoint(out, precisions):
        raise OptionError(
            f"--resume: '{out}' has no checkpoint of {' or '.join(precisions)}; leave --resume out "
            "to start a run there, or give the --out of an earlier one."
        )
    _make_folders(out, [] if resume else precisions, [warm_start, *(out / p for p in precisions)])
    common = {"settings": run_settings, "warm_start": warm_start}
    supervisor = Supervisor(console, parallel=os.cpu_count() or 1)
    if not (resume and all(latest(out / precision) for precision in precisions)):
        supervisor.run([Stage("warm start", {**common, "folder": warm_start})])
    if not supervisor.interrupted:
        common["warm_start"] = latest(warm_start) or warm_start
        supervisor.run(
            [
                Stage(
                    precision,
                    {
                        **common,
                        "folder": out / precision,
                        "precision": precision,
                        "recipe": recipes[precision].to_dict(),
                        "steps": steps,
                        "resume": resume,
                    },
                )
                for precision in precisions
            ]
        )
    with console.status("Writing the report"):
        report = write_report(out)
    console.print(terminal_table(out))
    console.print(f"Report: {report}")
    if supervisor.interrupted:
        given = {
            "steps": steps,
            "compare": compare,
            "recipe": recipe,
            "seed": seed,
            "settings": settings,
        }
        again = _resume_command(out, precisions, given)
        console.print(f"Stopped early; continue with: {again}", markup=False, soft_wrap=True)
        raise typer.Exit(130)


def _check_recipe(recipe: Recipe, num_layers: int) -> None:
    """Raise what the engines would find wrong with a recipe, before the warm start."""
    from fp8rl import PluginManager
    from fp8rl.models.spec import ModelSpec

    if recipe.kv_cache.dtype == "int8_per_token_head":
        raise OptionError(
            "--recipe: kv_cache.dtype is int8_per_token_head, and there is no such KV cache on a "
            "CPU; set it to fp8_e4m3 or auto."
        )
    plugins = PluginManager()
    plugins.pin_policy(recipe.pins, ModelSpec.dense(num_layers).names)
    plugins.is_corrector(recipe.importance_sampling.corrector)


def _precisions(compare: str) -> list:
    from fp8rl_demo.settings import PRECISIONS

    names = [name.strip() for name in compare.split(",") if name.strip()]
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown or not names:
        raise OptionError(
            f"--compare: '{compare}' must be one or more of {', '.join(PRECISIONS)}, with commas."
        )
    return list(dict.fromkeys(names))


def _settings(text: str | None, seed: int):
    from pydantic import ValidationError

    from fp8rl.reading import explain, parse_json
    from fp8rl_demo.settings import Settings

    try:
        given = parse_json(text, "--settings") if text is not None else {}
    except RecipeError as error:
        raise OptionError(str(error)) from None
    if not isinstance(given, dict):
        raise OptionError(f"--settings must be a JSON object, not {type(given).__name__}.")
    if given.get("seed", seed) != seed:
        raise OptionError("--settings has a seed; give it as --seed.")
    try:
        return Settings.model_validate({**given, "seed": seed})
    except ValidationError as error:
        raise OptionError(f"Bad settings: {explain(error, '--settings', Settings)}") from None


def _has_checkpoint(out: Path, precisions: list[str]) -> bool:
    from fp8rl_demo.checkpoint import latest

    return any(latest(out / precision) for precision in precisions)


def _resume_command(out: Path, precisions: list[str], given: dict[str, Any]) -> str:
    """Return the command that continues after an interrupt, with the options of the same run."""
    words = ["fp8rl", "demo", *(["--resume"] if _has_checkpoint(out, precisions) else [])]
    defaults = inspect.signature(demo).parameters
    for name, value in given.items():
        if value != defaults[name].default:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, "--out", str(out)])


def _make_folders(out: Path, again: list[str], folders: list[Path]) -> None:
    """Delete the folders of earlier runs and make those of the new ones.

    Args:
        out: folder of all runs.
        again: runs to delete, because they start again. The warm start is a cache and stays.
        folders: folders to make.

    Raises:
        OptionError: a folder cannot be deleted or made.
    """
    try:
        for precision in again:
            if (out / precision / "run.json").is_file() or (out / precision / "log.txt").is_file():
                shutil.rmtree(out / precision)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--out: '{error.filename or out}' cannot be written to ({error.strerror}); give "
            "another folder."
        ) from None
