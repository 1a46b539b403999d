"""``benchmarks/decode_profile.py``: parts and bounds of a decode step, from recorded kernels."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.benchmarks import BENCHMARKS, imported

RECORDED = json.loads(
    (BENCHMARKS / "results" / "decode_profile_h100.json").read_text(encoding="utf-8")
)["results"]
H100 = 3.35e12


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("decode_profile", monkeypatch)


def shape(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "shapes" / f"{name}.json").read_text(encoding="utf-8"))


def model(name: str) -> torch.nn.Module:
    """The model in BF16, without memory."""
    values = shape(name)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["variant"])
def test_kernels_belong_to_the_parts_that_were_recorded(
    profile: ModuleType, recorded: dict[str, Any]
) -> None:
    """The twenty longest kernels of a run are in the file, and the sums of all by part."""
    sums: dict[str, float] = defaultdict(float)
    for kernel, microseconds in recorded["kernels_us"].items():
        sums[profile.part_of(kernel)] += microseconds
    assert set(sums) <= set(recorded["parts_us"])
    for part in ("attention", "linears"):
        assert sums[part] == pytest.approx(recorded["parts_us"][part], rel=0.03)
    for part, microseconds in sums.items():
        assert microseconds <= recorded["parts_us"][part] * 1.0001


def test_products_of_experts_are_told_from_others(profile: ModuleType) -> None:
    """DeepGEMM has one kernel for both; the recorded ones are of a dense model."""
    names = [name for each in RECORDED for name in each["kernels_us"] if "deep_gemm::" in name]
    assert names
    for name in names:
        assert profile.part_of(name) == "linears"
        assert profile.part_of(name.replace("u, 1u, ", "u, 64u, ", 1)) == "experts"
    assert profile.part_of("_fwd_kernel_ep_gather") == "experts"
    mla = "void sm90::flash_fwd_splitkv_mla_kernel<Traits<cutlass::bfloat16_t> >"
    assert profile.part_of(mla) == "attention"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["variant"])
def test_bounds_of_a_dense_model(profile: ModuleType, recorded: dict[str, Any]) -> None:
    """As they were computed for the recorded run from the config's widths."""
    sizes = profile.weight_sizes(model("qwen3_8b"))
    if recorded["variant"] != "bf16":  # a byte a weight, but for lm_head
        head = 2 * 4096 * 151936
        sizes["linears"] = ((sizes["linears"][0] - head) // 2 + head, sizes["linears"][1])
    variant, requests = recorded["variant"], recorded["requests"]
    found = profile.bounds(shape("qwen3_8b"), variant, sizes, requests, recorded["context"], H100)
    assert found.pop("experts") == 0
    assert found == pytest.approx(recorded["bounds_us"], rel=2e-3)


def test_log_probabilities_are_no_experts(profile: ModuleType) -> None:
    assert profile.part_of("_topk_log_softmax_kernel") == "log-probabilities"
    assert profile.part_of("void vllm::moe::topkGating<8>") == "experts"


def test_samples_of_a_prompt_are_neighbours(profile: ModuleType) -> None:
    first, second, third = profile.prompts(3, 5, samples=2)
    assert first == second != third


def test_bounds_of_experts_and_latents(profile: ModuleType) -> None:
    sizes = profile.weight_sizes(model("qwen3_30b_a3b"))
    assert sizes["experts"] == (2 * 48 * 128 * 3 * 2048 * 768, 48 * 128 * 3 * 2048 * 768)
    found = profile.bounds(shape("qwen3_30b_a3b"), "bf16", sizes, 256, 1000, 1e12)
    active = sizes["linears"][1] + sizes["experts"][1] * 8 / 128
    assert found["flops_us"] == pytest.approx(2 * 256 * active * 2 / 1.979e15 * 1e6)
    assert found["attention"] == pytest.approx(256 * 1000 * 48 * 2 * 4 * 128 * 2 / 1e6)
    cached = profile.bounds(shape("moonlight_16b_a3b"), "fp8rl", sizes, 1, 1, 1e6)["attention"]
    assert cached == 27 * (512 + 64) * 2


def test_bounds_of_a_wrapped_model_with_linear_attention(profile: ModuleType) -> None:
    """One layer of four caches keys and values; the config's keys are in its text part."""
    qwen3_5 = shape("qwen3_5_9b")
    wrapped = {"model_type": "qwen3_5", "text_config": qwen3_5, "vision_config": {}}
    for config in (qwen3_5, wrapped):
        found = profile.bounds(
            config, "fp8rl-kv", {"linears": (1, 1), "experts": (0, 0)}, 1, 1, 1e6
        )
        assert found["attention"] == 8 * 2 * 4 * 256


def test_table(profile: ModuleType) -> None:
    steps = {each["variant"]: each for each in RECORDED}
    head, _, attention, *_ = profile.table(steps).splitlines()
    assert head == "| part | " + " | ".join(steps) + " |"
    took = steps["bf16"]["parts_us"]["attention"]
    share = steps["bf16"]["bounds_us"]["attention"] / took
    assert f"| {took:.0f} ({share:.0%}) |" in attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2"], "--kernels needs --ranks 1"),
        (["--loads", "4x8x1024,4x8x79"], "--kernels needs 80 tokens out or more"),
    ],
)
def test_loads_that_cannot_be_profiled_are_refused(
    profile: ModuleType,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import rollout

    monkeypatch.setattr(sys, "argv", ["rollout.py", "--kernels", *arguments])
    with pytest.raises(SystemExit):
        rollout.parse()
    assert message in capsys.readouterr().err
