"""GPUs and kernels that are refused by name; what decides needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.kernels import require_served_ranks
from support.engine import Engine
from vllm_fp8rl.kernels import exact
from vllm_fp8rl.kernels.linear import block_gemm as delegated
from vllm_fp8rl.kernels.linear.choice import CPU_CACHE_ENV, select_kernel

SHAPE = GemmShape(0, 512, 256)


@pytest.fixture
def config(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """Of an engine on a Hopper GPU."""
    on(monkeypatch, (9, 0))
    made = VllmConfig()
    with set_current_vllm_config(made):
        yield made


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", classmethod(lambda *_: capability)
    )


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ((8, 0), "FP8 layers are served on compute capability 8.9 and 9.0, not on 8.0: it has no"),
        ((10, 0), "not on 10.0: they have never run on Blackwell, and need allow_untested_gpu: tr"),
        ((12, 0), "not on 12.0: its kernels were not looked at; use recipe.rollout=false here."),
        (None, "not on an unknown one"),
        ("ROCm", "not by ROCm"),  # whose capabilities are other numbers
        (
            "marlin",
            "layers that are refitted in place; set it to deep_gemm, cutlass, triton or auto.",
        ),
    ],
)
def test_other_gpus(config, monkeypatch, capability, why):
    """And a kernel that repacks weights."""
    if capability == "ROCm":
        monkeypatch.setattr(type(current_platform), "is_rocm", lambda platform: True)
    elif capability == "marlin":
        config.kernel_config.linear_backend = "marlin"
    else:
        on(monkeypatch, capability)
    with pytest.raises(UnsupportedError, match=re.escape(why)):
        delegated.delegate(SHAPE, Recipe(), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "message"),
    [("xpu", "no FP8 kernel for device 'xpu'"), ("cpu", f"{CPU_CACHE_ENV}='yes' has no meaning")],
)
def test_other_devices_and_settings(monkeypatch, device, message):
    monkeypatch.setenv(CPU_CACHE_ENV, "yes")
    with pytest.raises(UnsupportedError, match=message):
        select_kernel(torch.device(device), SHAPE, Recipe(), torch.bfloat16)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("weights", "block", [1, 32]), ("activations", "group", 32), ("kv_cache", "dtype", "mxfp8")],
)
def test_a_recipe_for_mxfp8(part, key, value):
    with pytest.raises(RecipeError, match=rf"{part}\.{key}"):
        Recipe.from_dict({part: {key: value}})


# What ``exact`` refuses of an engine over several tensor-parallel ranks.


def ranked(kv_heads: int = 2, words: int = 128) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: kv_heads,
            get_vocab_size=lambda: words,
            get_hidden_size=lambda: 256,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1000),
    )


def test_parts_that_the_trainer_does_not_have():
    exact._check_ranks(ranked())
    for given, message in (
        (ranked(kv_heads=3), "multiple of 2 as num_key_value_heads, not 3"),
        (ranked(words=100), "multiple of 64 as vocab_size, not 100"),
    ):
        with pytest.raises(UnsupportedError, match=f"{message}.* set tensor_parallel_size to 1"):
            exact._check_ranks(given)
    with pytest.raises(UnsupportedError, match="serves tensor_parallel_size 1 or 2, not 4"):
        require_served_ranks("tensor_parallel_size", 4)


def cut(x: torch.Tensor) -> torch.Tensor:
    """Float32 to bfloat16 without rounding to the nearest."""
    return (x.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()


def test_sums_that_are_not_rounded_as_the_trainers(monkeypatch):
    other = torch.randn(1000, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

    def gather(own: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((own, other[None, : own.shape[1]]), dim)

    def rounded_by(rounding: Any, rows: int) -> Any:
        def reduce(own: torch.Tensor) -> torch.Tensor:
            total = own.float() + other[: len(own)].float()
            return (rounding if len(own) >= rows else torch.Tensor.bfloat16)(total)

        return reduce

    monkeypatch.setattr(exact, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(exact, "tensor_model_parallel_all_gather", gather)
    monkeypatch.setattr(
        exact, "tensor_model_parallel_all_reduce", rounded_by(torch.Tensor.bfloat16, 1)
    )
    exact.check_sums(ranked())
    for rows, named in ((1, 1), (100, 256), (1000, 1000)):
        monkeypatch.setattr(exact, "tensor_model_parallel_all_reduce", rounded_by(cut, rows))
        with pytest.raises(UnsupportedError, match=rf"bfloat16 \[{named}, 256\]; set disable_cust"):
            exact.check_sums(ranked())
