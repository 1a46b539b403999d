"""Installations that are broken, and what vLLM says to who asks for ``fp8rl``; prints JSON.

vLLM logs what a plugin raises while it is loaded and goes on without it. Each case is made of files
that lie before the installed ones on ``sys.path``, in a process that has loaded no plugin yet.

    python broken_installations.py FOLDER_OF_CHECKPOINTS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"  # vLLM logs each traceback that it swallows

import vllm.plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import quantization

from support import engine as live_engine  # sets what vLLM reads at import

CASES: dict[str, dict[str, str]] = {
    "not installed": {"fp8rl-9.dist-info/entry_points.txt": ""},
    "excluded by VLLM_PLUGINS": {"VLLM_PLUGINS": "another"},
    "an entry point to a name that is gone": {
        "fp8rl-9.dist-info/entry_points.txt": "fp8rl = vllm_fp8rl:register_all",
    },
    "a module that raises": {"vllm_fp8rl/__init__.py": "raise RuntimeError('broken')"},
    "register raises": {
        "vllm_fp8rl/__init__.py": "def register():\n    raise RuntimeError('broken')"
    },
}


@contextmanager
def installed(files: dict[str, str]) -> Iterator[None]:
    """A fresh look at what is installed, with these files and variables before it."""
    forget()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            if name.isupper():
                os.environ[name] = text
                continue
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            if path.name == "entry_points.txt":
                text = f"[vllm.general_plugins]\n{text}\n"
                path.with_name("METADATA").write_text("Name: fp8rl\nVersion: 9\n")
            path.write_text(text)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            for name in files:
                os.environ.pop(name, None)
            forget()


def forget() -> None:
    """As in a process that has loaded no plugin."""
    vllm.plugins.plugins_loaded = False
    if "fp8rl" in quantization.QUANTIZATION_METHODS:
        quantization.QUANTIZATION_METHODS.remove("fp8rl")
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.pop("fp8rl", None)
    for name in list(sys.modules):
        if name.split(".")[0] in ("fp8rl", "vllm_fp8rl", "pluggy"):
            del sys.modules[name]


def asked(model: Path, **arguments: Any) -> str:
    """The error, or how the engine would run."""
    try:
        config = EngineArgs(str(model), skip_tokenizer_init=True, **arguments)
        made = config.create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"runs with quantization {made.model_config.quantization}"


def main(root: Path) -> None:
    by_config = Path(tempfile.mkdtemp()) / "model"
    by_config.mkdir()
    shape = json.loads((root / "a" / "config.json").read_text())
    (by_config / "config.json").write_text(
        json.dumps(shape | {"quantization_config": {"quant_method": "fp8rl"}})
    )
    live_engine.register_model(root / "a")
    found: dict[str, dict[str, str]] = {}
    for case, files in CASES.items():
        with installed(files):
            found[case] = {
                "by argument": asked(root / "a", quantization="fp8rl"),
                # In the same process once more: vLLM does not load plugins again.
                "by the model's config": asked(by_config),
            }
            if case == list(CASES)[-1]:
                found["not asked for"] = {case: asked(root / "a")}
    with installed({}):
        found["whole"] = {
            "by argument": asked(root / "a", quantization="fp8rl"),
            "by the model's config": asked(by_config),
        }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
