"""The ``fp8rl`` command line: it shows plugins, engines, recipes and pins; plugins add commands."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from fp8rl import PluginManager, Recipe, __version__
from fp8rl.errors import Fp8RLError, OptionError, PluginError, UnsupportedError
from fp8rl.models.folder import RECIPE_FILE, folder_module_names
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, EngineAdapter, ExactRequest, Section
from fp8rl.plugins.hookspecs import PROJECT
from fp8rl.precision_report import precision_section
from fp8rl.recipe import RECIPE_ENV

DEBUG_ENV = "FP8RL_DEBUG"
_PROMPTS = (
    "The tides rise and fall twice a day because",
    "List five facts about prime numbers.",
    "Question: a train leaves at 9:40 and arrives at 13:05. How long does it take?\nAnswer:",
    "def quicksort(values):",
    "Once upon a time a lighthouse keeper found a letter in a bottle, and it said",
    "Hello",
    "Translate into French: the old map was wrong about the river.",
    "1 + 1 =",
)


def main() -> None:
    """Run the command line; an :class:`Fp8RLError` becomes one red line and exit code 2.

    ``--debug`` or ``FP8RL_DEBUG=1`` shows the traceback instead.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    plugins = PluginManager(strict=False)
    app = build_app(plugins)
    for error in plugins.broken.values():
        errors.print(f"Warning: {error}", style="yellow", markup=False)
    try:
        app()
    except Fp8RLError as error:
        if "--debug" in sys.argv or os.environ.get(DEBUG_ENV, "0") not in ("", "0"):
            raise
        errors.print(f"Error: {error}", style="red", markup=False)
        sys.exit(2)


def build_app(plugins: PluginManager) -> typer.Typer:
    """Build the command line with the commands of all loaded plugins.

    A plugin whose ``register_commands`` fails is added to ``plugins.broken``.
    """
    app = typer.Typer(
        name=PROJECT,
        help="FP8 reinforcement learning of LLMs, as plugins of the engines you already run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_print_version)
        ] = False,
        debug: Annotated[
            bool, typer.Option("--debug", help=f"Show tracebacks, as {DEBUG_ENV}=1 does.")
        ] = False,
    ) -> None:
        pass

    @app.command("plugins")
    def list_plugins() -> None:
        """List installed plugins and the hooks each implements; exit 1 if one is broken."""
        Console().print(_plugin_table(plugins))
        if plugins.broken:
            raise typer.Exit(1)

    @app.command()
    def doctor(
        engine: Annotated[str | None, typer.Argument(help="Look at this engine only.")] = None,
        recipe: Annotated[
            str | None, typer.Option(help="Recipe file or JSON, for the table of pins.")
        ] = None,
        layers: Annotated[
            int | None, typer.Option(min=1, help="Decoder layers of a dense model.")
        ] = None,
        model: Annotated[
            Path | None, typer.Option(help="Folder of a Hugging Face model, instead of --layers.")
        ] = None,
        tp: Annotated[
            int | None,
            typer.Option("--tp", min=1, help="Tensor parallel size, for ENGINE with --model."),
        ] = None,
        config: Annotated[
            Path | None, typer.Option(help="Config of a run, for ENGINE: a YAML of NeMo RL.")
        ] = None,
        source: Annotated[
            Path | None,
            typer.Option(
                help="Checkout of ENGINE, for --config or --environments where it is not installed."
            ),
        ] = None,
        gpu_memory: Annotated[
            float | None, typer.Option(min=1, help="Memory of a GPU in GiB, for --config.")
        ] = None,
        environments: Annotated[
            bool,
            typer.Option("--environments", help="Ask every Python of ENGINE for fp8rl."),
        ] = False,
    ) -> None:
        """Check the engines on this machine, and what a recipe pins; exit 1 on problems.

        With ENGINE and --model also what that engine would do with the model, as far as it tells.
        With ENGINE and --config what a run with that config would do: exit 0 if it runs, 1 if it is
        refused, 2 if that cannot be told. --recipe stands in for a block that the config lacks.
        With ENGINE and --environments whether its driver and workers on this machine have fp8rl.
        """
        console = Console()
        problems = [str(error) for error in plugins.broken.values()]
        adapters = _chosen(plugins.engine_adapters(), engine)
        if environments and (config or model or recipe or layers or tp or gpu_memory):
            raise OptionError(
                "--environments goes with ENGINE and --source alone; leave out the other options."
            )
        if not environments:
            _check_config_options(config, source, gpu_memory, layers, tp)
        if environments or config is not None:
            if config is None:
                found = _examine_environments(plugins.engine_adapters(), engine, source)
            else:
                loaded = _load_recipe(recipe, plugins) if recipe is not None else None
                request = ConfigRequest(config, source, model, loaded, gpu_memory)
                found = _examine_config(plugins.engine_adapters(), engine, request)
            console.print(_engine_table(str(engine), found))
            for section in found.sections:
                console.print(_section_table(section))
            _print_problems(console, [*problems, *found.problems])
            return
        if tp is not None:
            _require_examiner(adapters, engine, model)
        names = _module_names(layers, model)
        loaded = _load_recipe(recipe, plugins) if recipe is not None or names else None
        for adapter in adapters:
            diagnosis = _guarded(adapter.diagnose, "its diagnosis")
            console.print(_engine_table(adapter.name, diagnosis))
            if diagnosis.installed is not None or engine is not None:
                problems += [f"{adapter.name}: {problem}" for problem in diagnosis.problems]
            if engine is not None and model is not None and diagnosis.installed is not None:
                assert loaded is not None  # a model has names
                examined = _examine(adapter, model, loaded, tp or 1)
                for section in examined.sections:
                    console.print(_section_table(section))
                problems += [f"{adapter.name}: {problem}" for problem in examined.problems]
        if loaded is not None:
            if names:
                policy = plugins.pin_policy(loaded.pins, names)
                console.print(_section_table(precision_section(policy.report())))
                console.print(policy.summary(), markup=False, soft_wrap=True)
            else:
                console.print("The recipe is valid; its pins need --layers or --model.")
        _print_problems(console, problems)

    @app.command("recipe")
    def show_recipe(
        file: Annotated[
            str | None,
            typer.Argument(help="Recipe file or JSON; else FP8RL_RECIPE, else defaults."),
        ] = None,
    ) -> None:
        """Validate a recipe and print it with all defaults as YAML."""
        loaded = _load_recipe(file, plugins)
        text = yaml.safe_dump(loaded.to_dict(), sort_keys=False)
        Console().print(text, markup=False, soft_wrap=True, end="")

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
        check: Annotated[
            bool, typer.Option("--check", help="Compare logprobs of OUT and CHECKPOINT at the end.")
        ] = False,
    ) -> None:
        """Write a block-FP8 checkpoint for stock vLLM and transformers.

        It is in the format that SGLang documents too (not run).

        Without --recipe and --config the recipe is CHECKPOINT's fp8rl_recipe.json, else
        FP8RL_RECIPE, else the default. KV scales come from the checkpoint or from --kv-scales.
        Exit 1 if --check finds a difference.
        """
        # Here, because it imports torch.
        from fp8rl.export import check_device, plan_export, write_export

        check_device(device)
        if check:
            checkers = [a for a in plugins.engine_adapters() if a.check_export is not None]
            if not checkers:
                raise OptionError("--check needs vllm_fp8rl, which is not installed; leave it out.")
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
        if check:
            problems: list[str] = []
            for adapter in checkers:
                assert adapter.check_export is not None
                found = adapter.check_export(checkpoint, out, loaded)
                console.print(_engine_table(adapter.name, found))
                problems += found.problems
            _print_problems(console, problems)

    @app.command("exact")
    def exact(
        model: Annotated[Path, typer.Argument(help="Folder of a model with safetensors.")],
        recipe: Annotated[
            str | None, typer.Option(help="Recipe file or JSON; else the default with exact.")
        ] = None,
        layers: Annotated[
            int, typer.Option(min=1, help="Decoder layers that run, of those there are.")
        ] = 2,
        prompts: Annotated[
            Path | None,
            typer.Option(help="Text file with a prompt in each line, of 200 tokens at most."),
        ] = None,
    ) -> None:
        """Compare the modules of rollout and trainer, bit by bit; exit 1 if one differs.

        vLLM samples with the first layers of MODEL, not compiled, and Megatron's modules get the
        inputs that vLLM's had. Then Megatron scores all that was sampled. MODEL is of Llama's or
        Qwen3's family, the trainer has Megatron's local spec; a CPU does, or a Hopper GPU.
        """
        adapters = plugins.engine_adapters()
        record = next((a.record_exact for a in adapters if a.record_exact), None)
        replay = next((a.replay_exact for a in adapters if a.replay_exact), None)
        if record is None or replay is None:
            raise OptionError(
                "exact needs vllm_fp8rl and megatron_fp8rl with their engines; install both."
            )
        # Here, because it imports torch.
        from fp8rl.first_layers import write_first_layers

        loaded = Recipe(exact=True) if recipe is None else _load_recipe(recipe, plugins)
        with TemporaryDirectory() as folder:
            small = Path(folder, "model")
            small.mkdir()
            write_first_layers(model, layers, small)
            request = ExactRequest(small, loaded, _prompts(prompts), Path(folder, "record.pt"))
            record(request)
            found = replay(request)
        console = Console()
        title = f"exact: {str(loaded.exact).lower()}"
        shares = [
            (row.name, f"{row.equal / row.total:.4%}", str(row.total - row.equal), str(row.total))
            for row in found
        ]
        table = Section(title, ("module", "equal bits", "differ", "of"), tuple(shares))
        console.print(_section_table(table))
        differ = [row.name for row in found if row.equal < row.total]
        if differ:
            _print_problems(console, [f"The first that differs is '{differ[0]}'."])

    _add_plugin_commands(app, plugins)
    return app


def _prompts(file: Path | None) -> tuple[str, ...]:
    """Lines of a file, or some prompts of our own."""
    if file is None:
        return _PROMPTS
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--prompts '{file}' cannot be read ({error}); give a text.") from None
    if not lines:
        raise OptionError(f"--prompts '{file}' holds no prompt; give a text with some lines.")
    return tuple(lines)


def _recipe_to_export(
    checkpoint: Path, recipe: str | None, config: Path | None, plugins: PluginManager
) -> tuple[str, Recipe]:
    """The recipe of an export, and where it comes from."""
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
    return origin, _load_recipe(recipe, plugins)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROJECT} {__version__}")
        raise typer.Exit()


def _add_plugin_commands(app: typer.Typer, plugins: PluginManager) -> None:
    for name, plugin in plugins.list_name_plugin():
        if plugin is None:
            continue
        others = [other for other in plugins.get_plugins() if other is not plugin]
        try:
            plugins.subset_hook_caller("register_commands", others)(app=app)
        except Exception as error:
            plugins.broken[name] = PluginError(
                f"fp8rl plugin '{name}' cannot add its commands: {type(error).__name__}: {error}."
            )


def _plugin_table(plugins: PluginManager) -> Table:
    table = Table("plugin", "distribution", "version", "hooks", title="fp8rl plugins")
    for column in table.columns:
        column.overflow = "fold"
    for name, point in plugins.entry_points.items():
        plugin = plugins.get_plugin(name)
        hooks = [c.name for c in plugins.get_hookcallers(plugin) or ()] if plugin else []
        state = (
            "[red]broken[/red]" if name in plugins.broken else ", ".join(sorted(hooks)) or "none"
        )
        distribution = point.dist
        table.add_row(
            name,
            distribution.name if distribution else "?",
            distribution.version if distribution else "?",
            state,
        )
    return table


def _chosen(adapters: list[EngineAdapter], engine: str | None) -> list[EngineAdapter]:
    chosen = [adapter for adapter in adapters if engine in (None, adapter.name)]
    if engine is not None and not chosen:
        known = ", ".join(adapter.name for adapter in adapters) or "none"
        raise UnsupportedError(f"No plugin serves the engine '{engine}'; known engines: {known}.")
    return chosen


def _require_examiner(
    adapters: list[EngineAdapter], engine: str | None, model: Path | None
) -> None:
    """Raise OptionError if no engine would use the tensor parallel size."""
    able = [adapter.name for adapter in adapters if adapter.examine is not None]
    if engine is None or model is None or engine not in able:
        raise OptionError(
            f"--tp says how an engine splits a model: give it with --model and an engine that "
            f"looks at models ({', '.join(able) or f'{engine} does not'}), e.g. 'fp8rl doctor vllm "
            "--model DIR --tp 2', or leave it out."
        )


def _check_config_options(
    config: Path | None,
    source: Path | None,
    gpu_memory: float | None,
    layers: int | None,
    tp: int | None,
) -> None:
    """Raise OptionError for an option without --config, beside it, or without a finite value."""
    if config is None and (source is not None or gpu_memory is not None):
        raise OptionError(
            "--source and --gpu-memory belong to --config, and --source to --environments; give it "
            "as well, e.g. 'fp8rl doctor nemo-rl --config X.yaml', or leave them out."
        )
    if gpu_memory is not None and not math.isfinite(gpu_memory):
        raise OptionError(
            f"--gpu-memory is {gpu_memory}; give the memory of a GPU in GiB, e.g. 80."
        )
    if config is not None and (layers is not None or tp is not None):
        raise OptionError(
            "--layers and --tp do not go with --config, which has the parallel sizes and names the "
            "model; leave them out, and give --model where the model is not on this machine."
        )


def _examine_config(
    adapters: list[EngineAdapter], engine: str | None, request: ConfigRequest
) -> Diagnosis:
    able = {a.name: a.examine_config for a in adapters if a.examine_config is not None}
    if engine is None or engine not in able:
        raise OptionError(
            f"--config needs an engine that looks at configs ({', '.join(able) or 'none does'}), "
            "e.g. 'fp8rl doctor nemo-rl --config X.yaml'."
        )
    return _told(lambda: able[engine](request), f"{engine}: its look at the config")


def _examine_environments(
    adapters: list[EngineAdapter], engine: str | None, source: Path | None
) -> Diagnosis:
    able = {a.name: a.examine_environments for a in adapters if a.examine_environments is not None}
    if engine is None or engine not in able:
        raise OptionError(
            f"--environments needs an engine that has several ({', '.join(able) or 'none has'}), "
            "e.g. 'fp8rl doctor nemo-rl --environments'."
        )
    return _told(lambda: able[engine](source), f"{engine}: its look at the environments")


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


def _print_problems(console: Console, problems: list[str]) -> None:
    """Print one line for each problem, and end with exit code 1 if there are any."""
    for problem in problems:
        console.print(f"Problem: {problem}", style="red", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _guarded(look: Callable[[], Diagnosis], what: str) -> Diagnosis:
    """Call a plugin; an exception becomes a problem of the diagnosis."""
    try:
        return look()
    except Exception as error:
        problem = f"{what} failed: {type(error).__name__}: {error}"
        return Diagnosis(installed="unknown", supported=(), problems=(problem,))


def _examine(adapter: EngineAdapter, model: Path, recipe: Recipe, ranks: int) -> Diagnosis:
    examine = adapter.examine
    if examine is None:
        return Diagnosis(installed="unknown", supported=())
    return _guarded(lambda: examine(model, recipe, ranks), "its look at the model")


def _section_table(section: Section) -> Table:
    table = Table(title=section.title, show_header=any(section.columns), min_width=40)
    for number, heading in enumerate(section.columns):
        table.add_column(heading, overflow="fold", style=None if number else "bold")
    for row in section.rows:
        table.add_row(*map(escape, row))
    return table


def _engine_table(name: str, diagnosis: Diagnosis) -> Table:
    table = Table(title=name, show_header=False, min_width=40)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("installed", diagnosis.installed or "[yellow]no[/yellow]")
    table.add_row("tested with", ", ".join(diagnosis.supported) or "-")
    for key, value in diagnosis.facts.items():
        table.add_row(key, escape(value))
    state = "[red]problems[/red]" if diagnosis.problems else "[green]ok[/green]"
    table.add_row("state", state if diagnosis.installed else "[yellow]not installed[/yellow]")
    return table


def _load_recipe(source: str | None, plugins: PluginManager) -> Recipe:
    recipe = Recipe.load(source) if source is not None else Recipe.from_env() or Recipe()
    plugins.is_corrector(recipe.importance_sampling.corrector)
    return recipe


def _module_names(layers: int | None, model: Path | None) -> Sequence[str]:
    """Global module names of the model that the options give; empty if they give none."""
    if layers is not None and model is not None:
        raise OptionError("Give --layers or --model, not both.")
    if layers is not None:
        return ModelSpec.dense(layers).names
    return folder_module_names(model) if model is not None else []
