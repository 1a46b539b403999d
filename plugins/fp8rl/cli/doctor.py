"""``fp8rl doctor``: a subcommand for each engine, whose options are what the engine can look at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fp8rl.cli.output import engine_table, print_problems, section_table
from fp8rl.cli.recipes import load_recipe
from fp8rl.errors import Fp8RLError, OptionError, PluginError
from fp8rl.models.folder import folder_module_names
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, EngineAdapter
from fp8rl.plugins.manager import PluginManager
from fp8rl.precision_report import precision_section

ModelArgument = Annotated[
    Path | None, typer.Argument(help="Folder of a Hugging Face model; a config.json does.")
]
RecipeOption = Annotated[str | None, typer.Option(help="Recipe file or JSON, with MODEL.")]
TensorParallelOption = Annotated[
    int | None, typer.Option("--tp", min=1, help="Tensor parallel size, with MODEL.")
]
ConfigArgument = Annotated[Path | None, typer.Argument(help="YAML of a run.")]
SourceOption = Annotated[
    Path | None, typer.Option(help="Checkout of the engine, where it is not installed.")
]
ConfigModelOption = Annotated[
    Path | None, typer.Option("--model", help="Folder of the model, instead of CONFIG's.")
]
ConfigRecipeOption = Annotated[
    str | None, typer.Option("--recipe", help="Recipe file or JSON for a CONFIG without one.")
]
MemoryOption = Annotated[
    float | None, typer.Option("--gpu-memory", min=1, help="Memory of a GPU in GiB.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: engines and problems.")]


def add_doctor(app: typer.Typer, plugins: PluginManager) -> None:
    """Add ``doctor`` with a subcommand for each engine that a plugin serves.

    A plugin that cannot name its engines is added to ``plugins.broken``.
    """
    try:
        adapters = plugins.engine_adapters()
    except PluginError as error:
        plugins.broken["register_engine_adapters"] = error
        adapters = []
    group = typer.Typer(rich_markup_mode=None)

    @group.callback(invoke_without_command=True)
    def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
        """Check the engines on this machine; exit 1 on problems.

        A subcommand looks at one engine, and at a model or a config for it.
        """
        if context.invoked_subcommand is not None:
            if as_json:
                raise OptionError(f"Write --json behind '{context.invoked_subcommand}'.")
            return
        found = {adapter.name: _diagnosed(adapter) for adapter in adapters}
        problems = [
            f"{name}: {problem}"
            for name, diagnosis in found.items()
            if diagnosis.installed is not None  # a trainer and a rollout often have one each
            for problem in diagnosis.problems
        ]
        _show(plugins, found, problems, as_json)

    app.add_typer(group, name="doctor")
    for adapter in adapters:
        if adapter.examine_config is not None:
            _add_config_command(group, plugins, adapter, adapter.examine_config)
        else:
            _add_model_command(group, plugins, adapter)
        if adapter.examine_environments is not None:
            _add_environments_command(group, plugins, adapter.name, adapter.examine_environments)


def _add_model_command(group: typer.Typer, plugins: PluginManager, adapter: EngineAdapter) -> None:
    """Add the command of an engine that looks at models, or at none."""

    def look(model: Path | None, recipe: str | None, tp: int | None, as_json: bool) -> None:
        if model is None and (recipe is not None or tp is not None):
            raise OptionError(
                f"The options of 'fp8rl doctor {adapter.name}' need a model; give its folder as "
                "MODEL, or leave them out."
            )
        found = _diagnosed(adapter)
        if model is not None:
            found = _with_model(plugins, adapter, found, model, recipe, tp or 1)
        _show(plugins, {adapter.name: found}, found.problems, as_json)

    help_text = f"Check {adapter.name} here, and what it would do with MODEL; exit 1 on problems."
    if adapter.examine is None:

        @group.command(adapter.name, help=help_text)
        def without_ranks(
            model: ModelArgument = None, recipe: RecipeOption = None, as_json: JsonOption = False
        ) -> None:
            look(model, recipe, None, as_json)

        return

    @group.command(adapter.name, help=help_text)
    def with_ranks(
        model: ModelArgument = None,
        recipe: RecipeOption = None,
        tp: TensorParallelOption = None,
        as_json: JsonOption = False,
    ) -> None:
        look(model, recipe, tp, as_json)


def _add_config_command(
    group: typer.Typer,
    plugins: PluginManager,
    adapter: EngineAdapter,
    examine: Callable[[ConfigRequest], Diagnosis],
) -> None:
    """Add the command of an engine that looks at the configs of its runs."""

    @group.command(
        adapter.name,
        help=f"Check {adapter.name} here, or what a run with CONFIG would do, without starting it."
        "\n\nExit 0: it runs; 1: it is refused; 2: that cannot be told.",
    )
    def look(
        config: ConfigArgument = None,
        source: SourceOption = None,
        model: ConfigModelOption = None,
        recipe: ConfigRecipeOption = None,
        gpu_memory: MemoryOption = None,
        as_json: JsonOption = False,
    ) -> None:
        if config is None:
            if any(value is not None for value in (source, model, recipe, gpu_memory)):
                raise OptionError(
                    f"The options of 'fp8rl doctor {adapter.name}' need a config; give its YAML as "
                    "CONFIG, or leave them out."
                )
            found = _diagnosed(adapter)
        else:
            if gpu_memory is not None and not math.isfinite(gpu_memory):
                raise OptionError(
                    f"--gpu-memory is {gpu_memory}; give the memory of a GPU in GiB, e.g. 80."
                )
            loaded = load_recipe(recipe, plugins) if recipe is not None else None
            request = ConfigRequest(config, source, model, loaded, gpu_memory)
            found = _told(lambda: examine(request), f"{adapter.name}: its look at the config")
        _show(plugins, {adapter.name: found}, found.problems, as_json)


def _add_environments_command(
    group: typer.Typer,
    plugins: PluginManager,
    name: str,
    examine: Callable[[Path | None], Diagnosis],
) -> None:
    """Add the command of an engine that runs in several interpreters."""

    @group.command(
        f"{name}-environments",
        help=f"Ask the Python of each worker and driver of {name} for fp8rl; exit 1 if one lacks "
        "it.",
    )
    def look(source: SourceOption = None, as_json: JsonOption = False) -> None:
        found = _told(lambda: examine(source), f"{name}: its look at the environments")
        _show(plugins, {name: found}, found.problems, as_json)


def _with_model(
    plugins: PluginManager,
    adapter: EngineAdapter,
    found: Diagnosis,
    model: Path,
    recipe: str | None,
    ranks: int,
) -> Diagnosis:
    """Add to a diagnosis what the engine would do with a model, and the model's pins."""
    loaded = load_recipe(recipe, plugins)
    policy = plugins.pin_policy(loaded.pins, folder_module_names(model))
    sections, problems = found.sections, found.problems
    examine = adapter.examine
    if examine is not None and found.installed is not None:
        more = _guarded(lambda: examine(model, loaded, ranks), "its look at the model")
        sections, problems = (*sections, *more.sections), (*problems, *more.problems)
    return replace(
        found,
        facts={**found.facts, "pins": policy.summary()},
        sections=(*sections, precision_section(policy.report())),
        problems=problems,
    )


def _show(
    plugins: PluginManager, found: Mapping[str, Diagnosis], problems: Sequence[str], as_json: bool
) -> None:
    """Print diagnoses and all problems, and end with exit code 1 if there are any."""
    problems = [*map(str, plugins.broken.values()), *problems]
    if as_json:
        engines = {name: asdict(diagnosis) for name, diagnosis in found.items()}
        typer.echo(json.dumps({"engines": engines, "problems": problems}, indent=2))
        raise typer.Exit(1 if problems else 0)
    console = Console()
    for name, diagnosis in found.items():
        console.print(engine_table(name, diagnosis))
        for section in diagnosis.sections:
            console.print(section_table(section))
    print_problems(console, problems)


def _diagnosed(adapter: EngineAdapter) -> Diagnosis:
    return _guarded(adapter.diagnose, "its diagnosis")


def _guarded(look: Callable[[], Diagnosis], what: str) -> Diagnosis:
    """Call a plugin; an exception becomes a problem of the diagnosis."""
    try:
        return look()
    except Exception as error:
        problem = f"{what} failed: {type(error).__name__}: {error}"
        return Diagnosis(installed="unknown", supported=(), problems=(problem,))


def _told(look: Callable[[], Diagnosis], what: str) -> Diagnosis:
    """Call a plugin; an exception that is none of ours means that nothing can be told."""
    try:
        return look()
    except Fp8RLError:
        raise
    except Exception as error:
        raise PluginError(
            f"{what} failed: {type(error).__name__}: {error}; run again with 'fp8rl --debug' to "
            "see where."
        ) from error
