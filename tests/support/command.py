"""Calls of the ``fp8rl`` command line, with engines that are stand-ins."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from fp8rl import PluginManager, cli, hookimpl
from fp8rl.plugins.adapters import Diagnosis, EngineAdapter

GOOD = Diagnosis("1.2.3", ("1.2.3", "1.3"), {"device": "cpu [really]"})
SICK = Diagnosis("0.1", ("1.2.3",), problems=("Version 0.1 is too old; install 1.2.3.",))


def engines(**diagnoses: Diagnosis | Exception) -> PluginManager:
    """A manager with one plugin that serves these engines and the corrector ``is``."""

    def diagnose(result):
        def run() -> Diagnosis:
            if isinstance(result, Exception):
                raise result
            return result

        return run

    @hookimpl
    def register_engine_adapters():
        return [EngineAdapter(name, diagnose(result)) for name, result in diagnoses.items()]

    @hookimpl
    def register_is_correctors():
        return {"is": abs}

    plugins = PluginManager(discover=False)
    plugin = ModuleType("test")
    vars(plugin).update(
        register_engine_adapters=register_engine_adapters,
        register_is_correctors=register_is_correctors,
    )
    plugins.register(plugin)
    return plugins


def run(plugins: PluginManager, *arguments: str):
    return CliRunner().invoke(cli.build_app(plugins), arguments)


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fp8rl", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err


def table_rows(output: str) -> dict[str, tuple[str, str]]:
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {r[0].strip(): (r[1].strip(), r[2].strip()) for r in rows if len(r) == 3}
