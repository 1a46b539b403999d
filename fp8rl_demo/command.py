"""``fp8rl demo``: the whole FP8 RL loop on one CPU or one GPU, with the real engines."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8rl.errors import OptionError, RecipeError

if TYPE_CHECKING:
    from fp8rl import Recipe
    from fp8rl_demo.settings import Settings
    from fp8rl_demo.tasks import Task


def demo(
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps in all.")] = 40,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe: a YAML or JSON file, or a JSON object.")
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Precisions to run, of bf16, fp8-rollout, fp8, exact, with commas.")
    ] = "bf16,fp8",
    model: Annotated[
        str | None, typer.Option(help="Model to train: a folder, or a name on Hugging Face's hub.")
    ] = None,
    task: Annotated[str, typer.Option(help="sums, or a dataset of reasoning-gym.")] = "sums",
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
    """Train by GRPO, with rollouts in vLLM: a model of yours, or a small Qwen3 after a warm start.

    It runs on the GPU where there is one. Writes metrics.jsonl (one line per step), checkpoints and
    report.html to --out. After Ctrl-C the run finishes its step and writes a checkpoint and the
    report; --resume continues from there.
    """
    import torch
    from rich.console import Console

    from fp8rl import Recipe
    from fp8rl_demo.checkpoint import latest
    from fp8rl_demo.report import terminal_table, write_report
    from fp8rl_demo.settings import DEMO_RECIPE, recipe_for, task_of
    from fp8rl_demo.supervisor import Stage, Supervisor

    console = Console()
    if find_spec("matplotlib") is None:
        raise OptionError("The report needs matplotlib; run pip install matplotlib.")
    gpu = torch.cuda.is_available()
    precisions = _precisions(compare)
    run_settings = _settings(settings, seed, model, task)
    length = _length(run_settings, task_of(run_settings))
    base = DEMO_RECIPE if model is None else Recipe()
    base = Recipe.load(recipe) if recipe is not None else base
    recipes = {precision: recipe_for(precision, base) for precision in precisions}
    for each in recipes.values():
        _check_recipe(each, run_settings, gpu)
    if model is None and Path("/dev/nvidiactl").exists():
        console.print("This machine has a GPU: docs/quickstart_gpu.md trains a real model on it.")
    warm_start = out / "warm-start"
    if resume and not _has_checkpoint(out, precisions):
        raise OptionError(
            f"--resume: '{out}' has no checkpoint of {' or '.join(precisions)}; leave --resume out "
            "to start a run there, or give the --out of an earlier one."
        )
    folders = [out / p for p in precisions]
    folders += [warm_start] if model is None else []
    _make_folders(out, [] if resume else precisions, folders)
    common: dict[str, Any] = {"settings": run_settings, "length": length, "warm_start": None}
    supervisor = Supervisor(console, parallel=1 if gpu else os.cpu_count() or 1)
    if model is None and not (resume and all(latest(out / precision) for precision in precisions)):
        supervisor.run([Stage("warm start", {**common, "folder": warm_start})])
    try:
        if not supervisor.interrupted:
            if model is None:
                common["warm_start"] = latest(warm_start) or warm_start
            common |= {"steps": steps, "resume": resume}
            jobs = [
                {"precision": p, "folder": out / p, "recipe": recipes[p].to_dict(), **common}
                for p in precisions
            ]
            supervisor.run([Stage(job["precision"], job) for job in jobs])
    finally:  # of what ran before an error too
        with console.status("Writing the report"):
            report = write_report(out)
        console.print(terminal_table(out))
        console.print(f"Report: {report}")
    if supervisor.interrupted:
        given = {
            "steps": steps,
            "compare": compare,
            "model": model,
            "task": task,
            "recipe": recipe,
            "seed": seed,
            "settings": settings,
        }
        again = _resume_command(out, precisions, given)
        console.print(f"Stopped early; continue with: {again}", markup=False, soft_wrap=True)
        raise typer.Exit(130)


def _check_recipe(recipe: Recipe, settings: Settings, gpu: bool) -> None:
    """Raise what the engines would find wrong with a recipe, before anything starts."""
    from fp8rl import PluginManager
    from fp8rl.models.folder import folder_module_names
    from fp8rl.models.spec import ModelSpec

    if recipe.kv_cache.dtype == "int8_per_token_head" and not gpu:
        raise OptionError(
            "--recipe: kv_cache.dtype is int8_per_token_head, and there is no such KV cache on a "
            "CPU; set it to fp8_e4m3 or auto."
        )
    plugins = PluginManager()
    names = (
        ModelSpec.dense(settings.model.num_layers).names
        if settings.pretrained is None
        else folder_module_names(Path(settings.pretrained))
    )
    plugins.pin_policy(recipe.pins, names)
    plugins.is_corrector(recipe.importance_sampling.corrector)


def _length(settings: Settings, task: Task) -> int:
    """Return the tokens of the longest prompt and answer."""
    from fp8rl.models.folder import folder_config
    from fp8rl_demo.settings import POSITIONS, tokenizer_of

    positions: Any = POSITIONS
    if settings.pretrained is not None:
        config = folder_config(Path(settings.pretrained))
        positions = (config.get("text_config") or config).get("max_position_embeddings")
    tokenizer = tokenizer_of(settings)
    prompts = (problem.prompt for problem in (*task.train, *task.validation))
    length = max(len(tokenizer.encode(prompt)) for prompt in prompts) + settings.max_new_tokens
    if isinstance(positions, int) and length > positions:
        raise OptionError(
            f"--task: a prompt of '{settings.task}' and its answer take up to {length} tokens, and "
            f"the model has {positions} positions; give another task, or --settings with fewer "
            "max_new_tokens."
        )
    return length


def _precisions(compare: str) -> list:
    from fp8rl_demo.settings import PRECISIONS

    names = [name.strip() for name in compare.split(",") if name.strip()]
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown or not names:
        raise OptionError(
            f"--compare: '{compare}' must be one or more of {', '.join(PRECISIONS)}, with commas."
        )
    return list(dict.fromkeys(names))


def _settings(text: str | None, seed: int, model: str | None, task: str) -> Settings:
    from pydantic import ValidationError

    from fp8rl.models.folder import folder_config, local_folder, require_plain_weights
    from fp8rl.reading import explain, parse_json
    from fp8rl_demo.settings import PRETRAINED, Settings

    try:
        given = parse_json(text, "--settings") if text is not None else {}
    except RecipeError as error:
        raise OptionError(str(error)) from None
    if not isinstance(given, dict):
        raise OptionError(f"--settings must be a JSON object, not {type(given).__name__}.")
    if given.get("seed", seed) != seed:
        raise OptionError("--settings has a seed; give it as --seed.")
    for key, option in (("pretrained", "model"), ("pretrained_name", "model"), ("task", "task")):
        if key in given:
            raise OptionError(f"--settings has '{key}'; give it as --{option}.")
    if model is None and task != "sums":
        raise OptionError(
            f"--task: '{task}' needs --model; the demo's own model learns sums alone."
        )
    options: dict[str, Any] = {"seed": seed, "task": task}
    if model is not None:
        if unused := sorted({"model", "warm_start"} & set(given)):
            raise OptionError(f"--settings: '{unused[0]}' means nothing with --model; remove it.")
        given = {**PRETRAINED, **given}
        folder = local_folder(model)
        require_plain_weights(folder_config(folder), model)
        options["pretrained"] = str(folder)
        options["pretrained_name"] = str(folder) if Path(model).is_dir() else model
    try:
        return Settings.model_validate({**given, **options})
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
    """Delete the folders of earlier runs and make those of the new ones."""
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
