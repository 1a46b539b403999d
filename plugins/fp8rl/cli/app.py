"""The ``fp8rl`` command line: it shows plugins, engines, recipes and pins; plugins add commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from fp8rl import PluginManager, __version__
from fp8rl.cli.doctor import add_doctor
from fp8rl.cli.exact import add_exact
from fp8rl.cli.export import add_export
from fp8rl.cli.output import section_table
from fp8rl.cli.recipes import load_recipe
from fp8rl.errors import Fp8RLError, OptionError, PluginError
from fp8rl.models.folder import folder_module_names
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.hookspecs import PROJECT
from fp8rl.precision_report import precision_section

DEBUG_ENV = "FP8RL_DEBUG"


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
        rich_markup_mode=None,
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

    @app.command("recipe")
    def show_recipe(
        file: Annotated[
            str | None,
            typer.Argument(help="Recipe file or JSON; else FP8RL_RECIPE, else defaults."),
        ] = None,
    ) -> None:
        """Validate a recipe and print it with all defaults as YAML."""
        loaded = load_recipe(file, plugins)
        text = yaml.safe_dump(loaded.to_dict(), sort_keys=False)
        Console().print(text, markup=False, soft_wrap=True, end="")

    @app.command("pins")
    def show_pins(
        model: Annotated[
            Path | None, typer.Argument(help="Folder of a Hugging Face model; a config.json does.")
        ] = None,
        layers: Annotated[
            int | None, typer.Option(min=1, help="Decoder layers of a dense model, without MODEL.")
        ] = None,
        recipe: Annotated[
            str | None, typer.Option(help="Recipe file or JSON; else FP8RL_RECIPE, else defaults.")
        ] = None,
    ) -> None:
        """Show which modules of a model run in FP8 and which in BF16, and why."""
        loaded = load_recipe(recipe, plugins)
        if model is not None and layers is None:
            names = folder_module_names(model)
        elif layers is not None and model is None:
            names = ModelSpec.dense(layers).names
        else:
            raise OptionError("Give either the folder of a model or --layers.")
        policy = plugins.pin_policy(loaded.pins, names)
        console = Console()
        console.print(section_table(precision_section(policy.report())))
        console.print(policy.summary(), markup=False, soft_wrap=True)

    add_doctor(app, plugins)
    add_export(app, plugins)
    add_exact(app, plugins)
    _add_plugin_commands(app, plugins)
    return app


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
