"""vLLM's kernels, as layers are given them, against the reference of the numeric contract."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape, ReferenceBackend
from fp8rl.numerics import Quantized, quantize_block, quantize_group
from fp8rl.recipe import ActivationFormat

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

import vllm_fp8rl
from support.tiny import make_checkpoint

BACKENDS = ("deep_gemm", "cutlass", "triton")
# Rows that no tile divides; output features that only Triton takes, or DeepGEMM and Triton.
SHAPES = [(1, 512, 256), (300, 1024, 512), (33, 192, 256), (5, 72, 128)]
SHAPES += [(33, 960, 576), (5, 128, 64)]  # the last group of inputs is filled


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), 0)
    arguments = vllm_fp8rl.engine_args(Recipe())
    return EngineArgs(str(path), skip_tokenizer_init=True, **arguments).create_engine_config()


@pytest.fixture
def delegated(engine_config: VllmConfig) -> Iterator[ModuleType]:
    with set_current_vllm_config(engine_config):
        yield pytest.importorskip("vllm_fp8rl.kernels.linear.block_gemm")
    engine_config.kernel_config.linear_backend = "auto"


def tensors(m: int, n: int, k: int) -> tuple[torch.Tensor, Quantized]:
    generator = torch.Generator().manual_seed(m * n + k)
    x = torch.randn(m, k, generator=generator).to(torch.bfloat16)
    x *= torch.logspace(-3, 1, m)[:, None].bfloat16()  # rows of very different sizes
    w = torch.randn(n, k, generator=generator).to(torch.bfloat16) * 0.02
    return x, quantize_block(w)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_reference(backend, shape, scale_format, delegated, engine_config):
    engine_config.kernel_config.linear_backend = backend
    m, n, k = shape
    recipe = Recipe(activations=ActivationFormat(scale_format=scale_format))
    if (backend == "deep_gemm" and n % 64) or (backend == "cutlass" and n % 128):
        with pytest.raises(UnsupportedError, match=f"No FP8 kernel takes .*{backend}"):
            delegated.delegate(GemmShape(0, n, k), recipe, torch.bfloat16)
        return
    kernel = delegated.delegate(GemmShape(0, n, k), recipe, torch.bfloat16)
    assert kernel.backend == backend
    x, weight = tensors(m, n, k)
    rows = quantize_group(x, scale_format=scale_format)
    expected = ReferenceBackend().fprop(rows, weight, torch.float32)
    stored = torch.zeros(n, kernel.stored_columns(k), dtype=torch.uint8)
    stored[:, :k] = weight.codes.view(torch.uint8)
    weight = Quantized(stored.view(weight.codes.dtype), weight.scale_inv)
    live = Quantized(*(t.cuda() for t in weight))
    actual = kernel.apply(x.cuda(), live).cpu().float()
    # BF16 rounding leaves 0.0017. A code differs by one in 0.1% of places (vLLM divides by
    # amax / 448), which shows in rows where it hits a large value.
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 2.5e-3, error
    assert error.max() < 1.5e-2, error
    for before, after in zip(weight, live, strict=True):
        assert torch.equal(before.view(torch.uint8), after.cpu().view(torch.uint8))


def test_the_fastest_that_fits_is_chosen(delegated):
    def chosen(n: int, dtype: torch.dtype = torch.bfloat16) -> str:
        return delegated.delegate(GemmShape(0, n, 256), Recipe(), dtype).backend

    assert [chosen(n) for n in (512, 192, 72)] == ["deep_gemm", "deep_gemm", "triton"]
    assert chosen(512, torch.float16) == "cutlass"


@pytest.mark.parametrize(
    ("parameters", "neox"), [({}, True), ({"partial_rotary_factor": 0.5}, False)]
)
def test_rotation_in_float32(engine_config, parameters, neox):
    """vLLM's kernel with a float32 table, and Inductor's, are the formula of the CPU tests."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vllm_fp8rl.kernels.rounding import Float32Rotary

    with set_current_vllm_config(engine_config), torch.device("cuda"):
        parameters = {"rope_theta": 1e6, **parameters}
        vllms = get_rope(128, 2048, neox, parameters, torch.bfloat16)
        ours = Float32Rotary(vllms)
        positions = torch.randint(2048, (777,))
        qkv = torch.randn(777, 6 * 128).bfloat16()
        weight = torch.rand(128).bfloat16()
    q, k, _ = qkv.split([512, 128, 128], 1)  # rows apart, as in a model
    wanted = ours.forward_native(positions, q, k)
    own = vllms.forward_native(positions, q, k)[0]
    copy = qkv.clone()
    copies = copy.split([512, 128, 128], 1)
    kernel = ours.forward_cuda(positions, copies[0], copies[1])
    compiled = torch.compile(ours.forward_native, fullgraph=True)(positions, q, k)
    for got in (kernel, compiled):
        for one, other in zip(got, wanted, strict=True):
            assert (one != other).float().mean() < 1e-4  # products and sums in one instruction
    assert torch.equal(copy[:, 640:], qkv[:, 640:])
    assert (own != wanted[0]).float().mean() > 0.05

    def behind_a_norm(q: torch.Tensor) -> torch.Tensor:
        heads = q.view(777, 4, 128)
        normed = torch.nn.functional.rms_norm(heads, (128,), weight, 1e-6)
        return ours.forward_native(positions, normed.flatten(1))[0]

    q = q.contiguous()
    difference = torch.compile(behind_a_norm, fullgraph=True)(q) != behind_a_norm(q)
    assert difference.float().mean() < 1e-3  # the norm's sum has another order
