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


def test_pins_are_judged_by_the_whole_distribution(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers in float64, over weights that are rounded block by block here."""
    from transformers import AutoModelForCausalLM

    from support.tiny import add_chat_tokenizer, make_checkpoint

    folder = add_chat_tokenizer(make_checkpoint(tmp_path / "model", 0))
    answers, found = tmp_path / "answers.json", tmp_path / "pins.json"
    rows = {
        "weights": {"sides": ["weights"]},
        "one layer": {"sides": ["weights"], "pins": {"last": 1}},
        "none": {"pins": {"kinds": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}},
        "FP8 cache": {"pins": {"last": 2}, "kv_cache": {"dtype": "fp8_e4m3"}},
    }
    given = ["pins.py", folder, "--texts", 2, "--tokens", 6, "--answers", answers, "--json", found]
    for name, recipe in rows.items():
        given += ["--recipe", f"{name}={json.dumps(recipe)}"]
    monkeypatch.setattr(sys, "argv", list(map(str, given)))
    load("pins").main()
    result = json.loads(found.read_text(encoding="utf-8"))
    made = result["rows"]
    assert made["none"]["kl"] == pytest.approx(0, abs=1e-9) and made["none"]["top1"] == 1
    assert made["FP8"]["kl"] > made["weights"]["kl"] > made["one layer"]["kl"] > 1e-9
    assert made["FP8 cache"]["kl"] > 1e-9
    assert [row["bf16_flops"] for row in made.values()] == [0, 0, 0.5, 1, 1]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    texts = json.loads(answers.read_text(encoding="utf-8"))
    assert result["tokens"] == sum(len(answer) for _, answer in texts)

    def logprobs() -> list[torch.Tensor]:
        scored = (
            (model(torch.tensor([prompt + answer])).logits[0], len(prompt), len(answer))
            for prompt, answer in texts
        )
        return [each[start - 1 : start - 1 + n].log_softmax(-1) for each, start, n in scored]

    with torch.no_grad():
        plain = logprobs()
        for name, linear in model.named_modules():
            if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
                continue
            for rows_of in linear.weight.split(128):
                for block in rows_of.split(128, 1):
                    # In float64, or as the reciprocal times 448, some ties go the other way.
                    scale = torch.tensor(448.0) / block.float().abs().max()
                    block.copy_((block.float() * scale).to(torch.float8_e4m3fn).double() / scale)
        kl = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(plain, logprobs(), strict=True)]
    assert made["weights"]["kl"] == pytest.approx(sum(kl).item() / 2, rel=1e-3)


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
