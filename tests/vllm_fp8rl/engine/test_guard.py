"""The guard of every step: what it refuses, what it lets pass, and what a sleep leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.kv_scales import scale_name
from fp8rl.numerics import quantize_block
from support.engine import Engine, same_bits
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.engine.sleep import discardable
from vllm_fp8rl.kv.scales import kv_scale_state, set_kv_scales
from vllm_fp8rl.quantization.kv_cache import check_backend, check_exact_backend
from vllm_fp8rl.refit import drop_requests, refit
from vllm_fp8rl.storage.block_grid import BlockGrid, empty_storage

PROMPTS = [[5, 6, 7, 8], [9] * 40]
DOWN = "model.layers.1.mlp.down_proj.weight"
TAGS = ("weights", "kv_cache")


@pytest.fixture
def guard(engine: Engine, a: dict[str, torch.Tensor]) -> Iterator[RefitGuard]:
    guard = state_of(engine.model).guard
    yield guard
    drop_requests(engine.llm)
    guard.open()
    engine.model.load_weights(a.items())
    engine.llm.reset_prefix_cache()


def test_a_model_without_fp8rl_has_none():
    with pytest.raises(RefitError, match="no quantization='fp8rl'"):
        state_of(torch.nn.Linear(2, 2))


def test_codes_without_scales(engine, guard, a):
    tokens = engine.greedy(PROMPTS)
    codes, scale_inv = quantize_block(a[DOWN])
    engine.model.load_weights([(DOWN, codes)])
    engine.refuses(RefitError, "mlp.down_proj' received FP8 'weight' without its 'weight_scale")
    engine.model.load_weights([(f"{DOWN}_scale_inv", scale_inv)])
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens
    engine.model.load_weights([(f"{DOWN}_scale_inv", scale_inv)])
    engine.refuses(RefitError, "'weight_scale_inv' without its 'weight'")
    engine.model.load_weights([(DOWN, a[DOWN])])
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens


def test_vllms_trial_runs_pass():
    from vllm.v1.worker.cpu_worker import CPUWorker

    guard = RefitGuard({})
    guard.close("a refit is under way")
    for name in ("determine_available_memory", "compile_or_warm_up_model", "execute_dummy_batch"):
        assert hasattr(CPUWorker, name)
        trial: dict[str, Any] = {"__name__": "somewhere"}
        exec(f"def {name}(guard): guard.check()", trial)
        trial[name](guard)
    with pytest.raises(RefitError):
        guard.check()


# What a sleep does, on the model of a real engine. vLLM has no sleep mode on a CPU: the memory
# stays, and the guard is told by hand what ``WatchedBackend`` tells it (see tests/gpu).


def test_level_1_keeps_everything(engine, guard, a):
    tokens, scales = engine.greedy(PROMPTS), kv_scale_state(engine.model)
    guard.sleep(TAGS, {})
    engine.refuses(RefitError, "weights sleep; wake them first")
    with pytest.raises(RefitError, match="weights sleep; wake them first"):
        refit(engine.llm, a.items(), expect_kv_scales=False)
    with pytest.raises(RefitError, match="weights sleep; wake them first"):
        set_kv_scales(engine.model, {scale_name(0, "k"): 1.0})
    guard.wake(["weights"])
    engine.refuses(RefitError, "KV cache sleeps; wake it first")
    # What vLLM 0.25.1 does at the end of a wake-up.
    attention = engine.model.model.layers[1].self_attn.attn
    for held in (attention._k_scale, attention.k_scale.data, attention._v_scale):
        held.fill_(1.0)
    guard.wake(["kv_cache"])
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens
    assert kv_scale_state(engine.model) == scales
    assert attention._k_scale.item() == attention.k_scale.item() == scales[1, "k"]
    assert attention._v_scale.item() == scales[1, "v"]


@pytest.mark.parametrize("last", ["lm_head.weight", DOWN])
def test_level_2_refuses_until_every_parameter_came(engine, guard, a, last):
    tokens, scales = engine.greedy(PROMPTS), kv_scale_state(engine.model)
    discarded = dict(discardable(engine.model))
    assert set(discarded) == {n for n, _ in engine.model.named_parameters() if ".attn." not in n}
    guard.sleep(TAGS, discarded)
    guard.wake(None)
    engine.refuses(RefitError, r"level-2 sleep discarded 'model\..*refit the engine")
    engine.model.load_weights(item for item in a.items() if item[0] != last)
    engine.refuses(RefitError, rf"discarded '{last}' and no refit")
    engine.model.load_weights([(last, a[last])])
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens
    assert kv_scale_state(engine.model) == scales


def test_a_block_that_shards_share_is_discarded_until_all_came():
    codes, scale_inv = empty_storage(256, 256)
    grid = BlockGrid("qkv", lambda: (codes, scale_inv), [128, 64, 64], 200, "fp32")
    weight = torch.randn(256, 200, dtype=torch.bfloat16)
    parts = {0: weight[:128], 128: weight[128:192], 192: weight[192:]}
    for start, rows in parts.items():
        grid.write(grid.whole(start), rows)
    method = SimpleNamespace(discard=lambda layer: grid.discard())
    guard = RefitGuard({"qkv": SimpleNamespace(quant_method=method)})  # type: ignore[dict-item]
    guard.sleep(TAGS, {"qkv.weight": codes, "qkv.scale": scale_inv})
    guard.wake(None)
    for start in (192, 0, 128):
        with pytest.raises(RefitError, match=r"discarded 'qkv\.weight'"):
            guard.require_ready()
        grid.write(grid.whole(start), parts[start])
    guard.require_ready()
    expected = quantize_block(torch.nn.functional.pad(weight, (0, 56)))
    assert same_bits(codes, expected.codes) and same_bits(scale_inv, expected.scale_inv)


@pytest.mark.parametrize(
    ("name", "graphs", "message"),
    [
        ("FLASH_ATTN", "FULL_AND_PIECEWISE", None),
        ("TRITON_ATTN", "FULL_AND_PIECEWISE", None),
        ("FLASHINFER", "PIECEWISE", None),
        ("FLASHINFER", "FULL_AND_PIECEWISE", r"'FLASHINFER'.*constants.*'PIECEWISE'"),
        ("FLEX_ATTENTION", "PIECEWISE", r"'FLEX_ATTENTION' is not known.*FLASH_ATTN"),
        ("FLASH_ATTN", "exact", None),
        ("FLASHINFER", "exact", r"'FLASHINFER' has other kernels.*FLASH_ATTN, TRIT"),
    ],
)
def test_backends_that_see_new_scales_and_have_the_kernels_of_exact(name, graphs, message):
    from vllm.config import CompilationConfig, CUDAGraphMode

    with pytest.raises(UnsupportedError, match=message) if message else nullcontext():
        if graphs == "exact":
            check_exact_backend(name)
        else:
            check_backend(name, CompilationConfig(cudagraph_mode=CUDAGraphMode[graphs]))
