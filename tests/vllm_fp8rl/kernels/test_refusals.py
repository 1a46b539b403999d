"""GPUs and kernels that are refused by name; what decides needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.gemm import GemmShape
from support.engine import Engine
from vllm_fp8rl.kernels.linear import block_gemm as delegated

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


def refusal() -> str:
    with pytest.raises(UnsupportedError) as caught:
        delegated.delegate(SHAPE, Recipe(), torch.bfloat16)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["marlin", "aiter", "humming", "flashinfer_trtllm"])
def test_kernels_that_repack_weights(config: VllmConfig, backend: str) -> None:
    config.kernel_config.linear_backend = backend
    message = f"linear_backend='{backend}' cannot run layers that are refitted in place; set it to "
    assert refusal() == message + "deep_gemm, cutlass, triton or auto."


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ((8, 0), "not on 8.0: it has no FP8 units"),
        (
            (10, 0),
            "not on 10.0: they have never run on Blackwell, and need allow_untested_gpu: true",
        ),
        ((12, 0), "not on 12.0: its kernels were not looked at"),
        (None, "not on an unknown one"),
    ],
)
def test_other_gpus(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    why: str,
) -> None:
    on(monkeypatch, capability)
    served = "FP8 layers are served on compute capability 8.9 and 9.0, "
    assert refusal().startswith(f"{served}{why}")
    assert refusal().endswith("; use recipe.rollout=false here.")


def test_rocm_whose_capabilities_are_other_numbers(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda platform: True)
    assert "not by ROCm" in refusal()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("weights", "block", [1, 32]),
        ("weights", "scale_format", "ue8m0"),
        ("activations", "group", 32),
        ("kv_cache", "dtype", "mxfp8"),
    ],
)
def test_a_recipe_for_mxfp8(section: str, key: str, value: object) -> None:
    with pytest.raises(RecipeError, match=rf"{section}\.{key}"):
        Recipe.from_dict({section: {key: value}})


def test_other_devices() -> None:
    from vllm_fp8rl.kernels.linear.choice import select_kernel

    with pytest.raises(UnsupportedError, match="no FP8 kernel for device 'xpu'"):
        select_kernel(torch.device("xpu"), SHAPE, Recipe(), torch.bfloat16)
