"""Programs under ``benchmarks/``: each imports on a CPU, and runs there on tiny input."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.py")))
def test_a_program_imports_without_a_gpu(name: str, load: Any) -> None:
    if name in NEEDS_TRITON:
        pytest.importorskip("triton")
    module = load(name)
    lines = Path(module.__file__).read_text(encoding="utf-8").count("\n")
    assert module.__doc__ and lines <= 400


# --- models and data ---


def test_answers_of_programs_are_judged(load: Any) -> None:
    tasks = load("long_tasks")
    asked = tasks.problem(24, random.Random(0))
    told = tasks.demonstration(asked.prompt, random.Random(0))
    tokenizer = tasks.LongTokenizer()
    assert len(tokenizer.encode(asked.prompt, add_bos=False)) == tasks.prompt_length(24)
    assert len(tokenizer.encode(told, add_bos=False)) + 1 == tasks.answer_length(24)
    slipped = "".join(f"well{what}={digits}" for what, digits in tasks.run(asked.prompt, {3}))
    for answer, outcome in (
        (told, "right"),
        (told[: told.index("\\")], "box"),
        (told[:30], "form"),
        (slipped, "slip"),
    ):
        assert tasks.outcome(asked.prompt, answer) == outcome


# --- the driver of NeMo RL ---


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


def test_mismatch_by_position_is_that_of_single_tokens(tmp_path: Path, load: Any) -> None:
    """In float64; a response that does not count and a line that was cut off are left out."""
    results, tasks = load("nemo_rl_results"), load("long_tasks")
    asked = tasks.problem(1, random.Random(0)).prompt
    prompt = tasks.LongTokenizer().encode(asked, add_bos=False)
    length, draw = len(prompt) + 300, torch.Generator().manual_seed(0)
    generated, trained = (-torch.rand(2, length, generator=draw)).tolist()
    trained[-1] += 3.0  # far
    row = {
        "token_loss_mask": [[0] * len(prompt) + [1] * 300],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [generated],
        "prev_logprobs": [trained],
        "token_ids": [prompt + [30 + i % 90 for i in range(300)]],
        "rewards": [0.0],
    }
    text = [json.dumps(row), json.dumps(row | {"sample_loss_mask": [0.0]}), json.dumps(row)[:99]]
    file = tmp_path / "train_data_step1.jsonl"
    file.write_text("\n".join(text), encoding="utf-8")
    found = results.read_steps([file], results.judge_of("long", tmp_path))
    assert found["outcomes"] == [{"step": 1, "form": 1}]
    assert found["lengths"] == [{"start": 256, "answers": 1, "form": 1}]
    rows = [(row["start"], row["tokens"], row["far"]) for row in found["positions"]]
    assert rows == [(0, 128, 0), (128, 128, 0), (256, 44, 1)]
    for told, end in zip(found["positions"], (128, 256, 300), strict=True):
        span = slice(len(prompt) + told["start"], len(prompt) + end)
        both = torch.tensor([trained[span], generated[span]]).double()  # float32's values
        ratio = both[0] - both[1]
        assert told["kl"] == pytest.approx((ratio.exp() - 1 - ratio).mean().item(), rel=1e-12)
        assert told["error"] == pytest.approx(ratio.abs().exp().mean().item(), rel=1e-12)
