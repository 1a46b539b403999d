"""Hooks after the import of named modules, on a package made for the test."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nemo_rl_ext import autoload
from nemo_rl_ext.__main__ import main
from nemo_rl_ext.patch_finder import PATCHES, PatchFinder, installed
from nemo_rl_ext.patches.upstream import Upstream
from support.processes import run_code, run_forked

ROOT = Path(__file__).resolve().parents[3]


def run_after_torch(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """In a process that has imported torch, and with it our finder, before ``code`` runs."""
    script = path / "script.py"
    script.write_text(textwrap.dedent(code))
    return run_forked(script, timeout=120, folders=(path,))


def package(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        for folder in file.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
    return tmp_path


def test_importing_torch_installs_one_finder_and_imports_nothing_else() -> None:
    code = """
        import sys, torch
        print([type(f).__name__ for f in sys.meta_path if "nemo_rl_ext" in type(f).__module__],
              [m for m in ("wrapt", "pydantic", "pluggy", "fp8rl", "nemo_rl") if m in sys.modules])
        from nemo_rl_ext.patch_finder import install
        assert install() is install() is sys.meta_path[0]
    """
    done = run_code(code, timeout=120)
    assert done.stdout.strip() == "['PatchFinder'] []", done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("word", "on", "told"),
    [
        ("0", False, ""),
        (" OFF ", False, ""),
        ("", True, ""),
        ("nope", True, "FP8RL_AUTOLOAD is 'nope', which is neither on nor off"),
    ],
)
def test_words_that_switch_it_off_and_on(
    word: str,
    on: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = [finder for finder in sys.meta_path if not isinstance(finder, PatchFinder)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setenv("FP8RL_AUTOLOAD", word)
    autoload.start()
    assert (installed() is not None) == on
    assert [m.partition(";")[0] for m in caplog.messages] == ([told] if told else [])


def test_an_error_of_ours_does_not_break_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl_ext.patch_finder", None)  # its import raises
    autoload.start()
    assert "could not hook into NeMo RL" in caplog.text


def test_the_list_is_what_the_patches_rely_on() -> None:
    for module, patches in PATCHES.items():
        for patch in patches:
            upstreams = importlib.import_module(f"nemo_rl_ext.patches.{patch}").UPSTREAM
            assert all(isinstance(u, Upstream) for u in upstreams)
            assert module in {u.module for u in upstreams}
    files = {p.stem for p in (ROOT / "nemo_rl_ext" / "patches").glob("*.py")}
    assert files - {"__init__", "upstream"} == {p for ps in PATCHES.values() for p in ps}


LOAD_CONFIG = "def load_config(config_path):\n    return config_path\n"


ANEW = {
    "imported again": "del sys.modules[NAME]; importlib.import_module(NAME)",
    # A finder before ours, as test runners and profilers install them.
    "reloaded past us": """
ours = sys.meta_path.pop(0)
importlib.reload(sys.modules[NAME])
sys.meta_path.insert(0, ours)
""",
}


@pytest.mark.parametrize("how", ANEW)
def test_a_module_that_is_executed_anew_is_patched_anew(tmp_path: Path, how: str) -> None:
    """Naively its patches are lost, and `require_patches` says that all fit."""
    path = package(tmp_path, {"nemo_rl/utils/config.py": LOAD_CONFIG})
    code = f"""
import torch, importlib, sys
from nemo_rl_ext.patch_finder import installed
from nemo_rl_ext.patches.upstream import require_patches
NAME = "nemo_rl.utils.config"
importlib.import_module(NAME)
{ANEW[how]}
try:
    require_patches(installed(), "a.key")  # the other modules are missing here
except Exception as error:
    print("nemo_rl.utils.config" in str(error))
def layers(function):
    return 1 + layers(function.__wrapped__) if hasattr(function, "__wrapped__") else 0
print(layers(sys.modules[NAME].load_config))
installed().take_up()
print(layers(sys.modules[NAME].load_config))
"""
    done = run_after_torch(code, path)
    assert done.stdout.split() == ["False", "1", "1"], done.stderr


def test_a_module_that_does_not_fit_stays_and_is_told_where_the_keys_are_used(
    tmp_path: Path,
) -> None:
    """Also one that fitted when it was executed for the first time."""
    path = package(tmp_path, {"nemo_rl/utils/config.py": LOAD_CONFIG})
    code = """
        import torch, importlib, pathlib
        from nemo_rl.utils import config
        from nemo_rl_ext.patch_finder import installed
        from nemo_rl_ext.patches.upstream import require_patches
        changed = "def load_config(path, strict):\\n    return path\\n"
        pathlib.Path(config.__file__).write_text(changed)
        importlib.reload(config)
        print(config.load_config("x", True))
        print(("nemo_rl.utils.config", "start") in installed().applied)
        try:
            require_patches(installed(), "policy.megatron_cfg.fp8rl")
        except Exception as error:
            print(type(error).__name__, error)
    """
    untouched, applied, message = run_after_torch(code, path).stdout.splitlines()
    assert (untouched, applied) == ("x", "False")
    assert message == (
        "UnsupportedError 'policy.megatron_cfg.fp8rl' is set, but fp8rl's patch 'start' does not "
        "fit nemo_rl.utils.config: nemo_rl.utils.config.load_config takes (path, strict), which "
        "does not fit (config_path) of NeMo RL 7ea279a (22 August 2026). This NeMo RL is of an "
        "unknown version; fp8rl serves the main branch at 7ea279a (22 August 2026): check out that "
        "commit, or remove the key."
    )


def test_a_driver_reads_what_only_workers_import(tmp_path: Path) -> None:
    path = package(
        tmp_path,
        {
            "nemo_rl/utils/config.py": LOAD_CONFIG,
            "nemo_rl/models/generation/vllm/vllm_backend.py": """
                import not_in_the_drivers_environment

                class VllmInternalWorkerExtension:
                    def _weight_update_lifecycle(self, transport): ...
                    def _load_hf_weights(self, policy_weights, strict=True): ...
            """,
        },
    )
    code = """
        import torch, nemo_rl.utils.config
        from nemo_rl_ext.patch_finder import installed
        from nemo_rl_ext.patches.upstream import require_patches
        try:
            require_patches(installed(), "policy.megatron_cfg.fp8rl")
        except Exception as error:
            print(str(error)[:70])
        key = "nemo_rl.models.generation.vllm.vllm_backend", "worker_classes"
        print(installed().failures[key])
    """
    refused, reason = run_after_torch(code, path).stdout.strip().splitlines()
    assert "fp8rl's patch" in refused
    assert "_load_hf_weights takes (self, policy_weights, strict=...)" in reason


def test_the_launcher_runs_a_driver_with_the_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("meta_path", [*sys.meta_path]), ("path", [*sys.path]), ("argv", [])):
        monkeypatch.setattr(sys, name, value)
    (tmp_path / "neighbour.py").write_text("x = 1\n")
    driver = tmp_path / "driver.py"
    driver.write_text("import sys, neighbour; print(__name__, sys.argv[1:], neighbour.x)\n")
    main([str(driver), "--config", "a.yaml"])
    assert capsys.readouterr().out == "__main__ ['--config', 'a.yaml'] 1\n"
    assert installed() is not None
    with pytest.raises(SystemExit, match=r"'none\.py' is no file"):
        main(["none.py"])
