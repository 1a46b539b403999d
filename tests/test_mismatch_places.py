"""The ways of computing in ``benchmarks/mismatch_reference.py`` against the engines' own modules.

Each way must be that of its engine to the bit, or the benchmark's table means nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fp8rl import Recipe
from fp8rl.gemm import ReferenceBackend
from fp8rl.kv_scales import scale_names
from fp8rl.numerics import quantize_block, quantize_group
from support.cpu import kernels_round

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BF16 = torch.bfloat16


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


reference = load("mismatch_reference")


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(BF16)


def test_norms() -> None:
    """vLLM's rounds twice and reads the unrounded sum; torch's, that of Megatron's local layers,
    rounds once and reads the rounded sum, as vLLM's does with ``engine_options``."""
    ir = pytest.importorskip("vllm.ir.ops")
    from vllm_fp8rl.testing.trainer_numerics import PROVIDER, engine_options

    x, residual, weight = normal(64, 256), normal(64, 256, seed=1), normal(256, seed=2)
    total = x.float() + residual.float()
    vllm, stored = ir.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    assert torch.equal(stored, total.to(BF16))
    assert torch.equal(vllm, reference.rms_norm(total, weight, 1e-6, "twice"))
    torchs = torch.nn.functional.rms_norm(stored, (256,), weight, 1e-6)
    assert torch.equal(torchs, reference.rms_norm(stored.float(), weight, 1e-6, "once"))
    assert not torch.equal(torchs, vllm)
    engine_options()
    ours, stored = ir.fused_add_rms_norm.impls[PROVIDER].impl_fn(x, residual, weight, 1e-6)
    assert torch.equal(ours, torchs) and torch.equal(stored, total.to(BF16))
    plain = ir.rms_norm.impls[PROVIDER].impl_fn(x, weight, 1e-6)
    assert torch.equal(plain, torch.nn.functional.rms_norm(x, (256,), weight, 1e-6))


def test_rotary_embedding() -> None:
    """vLLM's CPU kernel rounds once, its native method rounds each product, as Megatron does.

    On some CPUs the kernel drops bits instead; the table of the benchmark is of those that round.
    """
    pytest.importorskip("vllm")
    pytest.importorskip("megatron.core")
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    length, heads, size = 64, 3, 128
    x = normal(length, heads, size)
    angles = torch.outer(
        torch.arange(length).float(), 1e4 ** (-torch.arange(size // 2) / (size // 2))
    )
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(BF16)
    kernel, key = x.flatten(1).clone(), x.flatten(1).clone()
    ops.rotary_embedding(torch.arange(length), kernel, key, size, cache, True)
    once = reference.rotate(x, angles[:, None], "once")
    if kernels_round():
        assert torch.equal(kernel.view_as(x), once)
    else:
        dropped = once.view(torch.int16) - kernel.view_as(x).view(torch.int16)
        assert dropped.unique().tolist() == [0, 1]
    native, _ = RotaryEmbedding.forward_static(
        torch.arange(length), x.flatten(1), None, size, size, cache, True
    )
    each = reference.rotate(x, angles[:, None], "each")
    assert torch.equal(native.view_as(x), each)
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    assert torch.equal(_apply_rotary_pos_emb_bshd(x[:, None], freqs)[:, 0], each)
    assert not torch.equal(kernel.view_as(x), each)


def test_attention() -> None:
    """The demo's attention is the reference's without rounding, with gradients of SDPA's."""
    pytest.importorskip("megatron.core")
    from megatron_fp8rl.testing.attention import UnroundedAttention

    q, k, v = (
        normal(9, 2, heads, 64, seed=i).float().requires_grad_()
        for i, heads in enumerate((4, 2, 2))
    )
    attention = UnroundedAttention.__new__(UnroundedAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = 64**-0.5
    out = attention(q, k, v, None)
    by_head = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *by_head, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).flatten(2))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for got, want in zip(
        grads, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    repeated = [x.repeat_interleave(4 // x.shape[1], 1).detach() for x in by_head]
    ways = reference.attend(*repeated, "float32").permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(out.detach(), ways)
    from fp8rl.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="attention_mask"):
        attention(q, k, v, torch.ones(9, 9, dtype=torch.bool))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another BLAS")
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    """With fewer than sixteen rows MKL alone would sum in another order (AVX2: than four)."""
    x, weight = quantize_group(normal(40, 4096)), quantize_block(normal(256, 4096, seed=1))
    backend = ReferenceBackend()
    whole = backend.fprop(x, weight, torch.float32)
    for rows in (1, 2, 3, 4, 5, 15, 16, 17, 32):
        part = type(x)(x.codes[:rows], x.scale_inv[:rows])
        assert torch.equal(backend.fprop(part, weight, torch.float32), whole[:rows]), rows


def test_scales_that_are_powers_of_two_make_dequantized_keys_and_values_exact(
    tmp_path: Path,
) -> None:
    """Every place is the same function, so only the ways that differ move logprobs; and with
    powers of two, BF16 holds a code times its scale."""
    from vllm_fp8rl.testing.tiny import make_checkpoint

    make_checkpoint(tmp_path, 0, hidden_size=128, intermediate_size=128, vocab_size=64)
    scales = dict.fromkeys(scale_names(2), 0.011)
    model = reference.Reference(tmp_path, Recipe(), scales, "cpu", 4)
    tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))
    base = reference.Ways(output="once")
    logprobs = model.logprobs(tokens, base)
    assert logprobs.shape == (4, 8) and torch.equal(logprobs, model.logprobs(tokens, base))
    for place, way in (
        ("kv", "bf16"),
        ("kv", "dequantized"),
        ("kv_scales", "pow2"),
        ("prompts", "fp8"),
        ("probabilities", "local"),
        ("norm_input", "bf16"),
        ("norm_weight", "once"),
        ("qk_norm_weight", "once"),
        ("rope", "each"),
        ("silu", "once"),
        ("logits", "float32"),
        ("linears", "bf16"),
    ):
        other = model.logprobs(tokens, base.but(**{place: way}))
        assert not torch.equal(other, logprobs), place
        assert (other - logprobs).abs().max() < 0.5, place
    pow2 = base.but(kv_scales="pow2")
    exact = model.logprobs(tokens, pow2.but(kv="dequantized"))
    assert torch.equal(exact, model.logprobs(tokens, pow2))
    assert torch.equal(exact, model.logprobs(tokens, pow2.but(output="twice")))


def test_benchmark_names_the_places_that_differ() -> None:
    for name in ("facts", "mismatch_model"):
        load(name)
    benchmark = load("mismatch_places")
    base, other = benchmark.ENGINES["CPU"]
    places = benchmark.differing(base, other)
    assert set(places) - {"kv", "output"} <= set(benchmark.ORDER)
    assert base.but(**{p: getattr(other, p) for p in places}) == other
    row = SimpleNamespace(**benchmark.compare(torch.zeros(2, 2), torch.zeros(2, 2)))
    assert (row.kl_k3, row.token_mult_prob_error, row.equal) == (0.0, 1.0, 1.0)
