"""Programs under ``benchmarks/``: each imports on a CPU, and runs there on tiny input."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.tiny import add_chat_tokenizer, make_checkpoint

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NEEDS_TRITON = ("quantize",)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a program by its name, but not under it: ``nemo_rl`` is NeMo RL's."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"benchmark_{name}", BENCHMARKS / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_pins_are_judged_on_tiny_input(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_chat_tokenizer(make_checkpoint(tmp_path / "model", 0))
    answers, found = tmp_path / "answers.json", tmp_path / "pins.json"
    rows = {
        "weights": {"sides": ["weights"]},
        "none": {"pins": {"kinds": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}},
    }
    given = ["pins.py", folder, "--texts", 2, "--tokens", 6, "--answers", answers, "--json", found]
    for name, recipe in rows.items():
        given += ["--recipe", f"{name}={json.dumps(recipe)}"]
    monkeypatch.setattr(sys, "argv", list(map(str, given)))
    load("pins").main()
    made = json.loads(found.read_text(encoding="utf-8"))["rows"]
    assert made["none"]["kl"] == pytest.approx(0, abs=1e-9) and made["none"]["top1"] == 1
    assert made["FP8"]["kl"] > made["weights"]["kl"] > 1e-9


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.py")))
def test_a_program_imports_without_a_gpu(name: str, load: Any) -> None:
    if name in NEEDS_TRITON:
        pytest.importorskip("triton")
    module = load(name)
    lines = Path(module.__file__).read_text(encoding="utf-8").count("\n")
    assert module.__doc__ and lines <= 400


@pytest.mark.parametrize("task", ["sums", "real"])
def test_the_exact_variant_is_served(
    task: str, tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl_ext.config.drivers import DRIVERS
    from nemo_rl_ext.config.keys import Sections
    from nemo_rl_ext.config.merge import read

    arguments = ["--source", tmp_path, "--folder", tmp_path, "--trainer", "megatron"]
    arguments += ["--variants", "fp8rl-exact", "--task", task]
    monkeypatch.setattr(sys, "argv", ["nemo_rl.py", *map(str, arguments)])
    program = load("nemo_rl")
    value = program.config(program.parse(), tmp_path, tmp_path, tmp_path, "fp8rl-exact")
    del value["defaults"]
    block = value.pop("fp8rl")
    policy = value["policy"]
    for section in (policy["megatron_cfg"], policy["generation"]["vllm_cfg"], value["loss_fn"]):
        section["fp8rl"] = block
    keys = read(Sections(value, DRIVERS["grpo"]))
    assert keys is not None and keys.recipe.exact and keys.recipe.kv_cache.dtype == "fp8_e4m3"


def test_the_table_of_sizes_and_times_is_the_scripts(load: Any) -> None:
    page = (BENCHMARKS.parent / "docs" / "scale.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for cells in load("scale").table():
        assert f"| {' | '.join(cells)} |" in lines
