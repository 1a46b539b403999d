"""Where rollout engine and trainer compute the same function, are the results equal to the bit?

    python benchmarks/equal_bits.py [--rows 4096] [--shapes 6144x4096,4096x12288] [--out FILE.json]

Three questions, on a CPU or on one GPU:

* ``gemm``: is a row of a product the same whatever the number M of rows beside it? A decode step
  has a few rows, a prompt hundreds, a training step thousands. The same for BF16 (``bf16``), and
  for each pair of FP8 backends at the largest M.
* ``kernels`` (GPU): which formula does each engine's kernel compute? Norm, SwiGLU, rotation; those
  of fp8rl that replace vLLM's too, and each pair of rollout and trainer.
* ``prompts`` (GPU, with vLLM): time of FlashAttention 3 over a prompt with queries, keys and values
  in E4M3, as the rollout runs prompts, and over keys and values dequantized to BF16 first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from facts import versions
from profiles import cold_ms

from fp8rl.gemm import GemmShape, builtin_backends
from fp8rl.numerics import Quantized, quantize_block, quantize_group

Tensors = dict[str, torch.Tensor]

COUNTS = (1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 1024, 2048)
"""Numbers of rows that are compared with the largest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="largest M; 4096 on a GPU, 512 on a CPU")
    parser.add_argument("--shapes", default="6144x4096,4096x12288", help="out x in features")
    parser.add_argument("--backends", help="default: all that serve the device")
    parser.add_argument("--out", type=Path, default=Path("equal_bits.json"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = options.rows or (4096 if device.type == "cuda" else 512)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": versions(),
        "rows": rows,
        "gemm": {},
    }
    for shape in options.shapes.split(","):
        out_features, in_features = map(int, shape.split("x"))
        names = options.backends.split(",") if options.backends else None
        found["gemm"][shape] = by_rows(rows, out_features, in_features, device, names)
        write(found, options.out)
    if device.type == "cuda":
        for name, check in (("kernels", kernels), ("prompts", prompts)):
            try:
                found[name] = check()
            except Exception as error:  # one part must not lose the others
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
            write(found, options.out)
    sys.stdout.write(options.out.read_text())


def write(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def by_rows(
    rows: int, out_features: int, in_features: int, device: torch.device, names: list[str] | None
) -> dict[str, Any]:
    """Compare products of the first M rows with those rows of the product of all.

    Returns:
        for each backend: M -> share of results that are not equal to the bit; and for each pair of
        FP8 backends that share at the largest M.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator).bfloat16()

    x, w = normal(rows, in_features), normal(out_features, in_features)
    codes, weight = quantize_group(x), quantize_block(w)
    result: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    for backend in builtin_backends():
        if names and backend.name not in names:
            continue
        if backend.name == "reference" and device.type == "cuda":
            continue
        shape = GemmShape(rows, out_features, in_features)
        reason = backend.supports(device, shape, "fp32")
        if reason is not None:
            result[backend.name] = {"unsupported": reason}
            continue

        def product(count: int, backend: Any = backend) -> torch.Tensor | None:
            shape = GemmShape(count, out_features, in_features)
            if backend.supports(device, shape, "fp32") is not None:
                return None
            part = Quantized(codes.codes[:count], codes.scale_inv[:count])
            return backend.fprop(part, weight, torch.bfloat16)

        whole[backend.name], result[backend.name] = compare_rows(product, rows)
    if not names or "bf16" in names:
        _, result["bf16"] = compare_rows(
            lambda count: torch.nn.functional.linear(x[:count], w), rows
        )
    for a, b in combinations(whole, 2):
        result[f"{a} and {b}"] = different(whole[a], whole[b])
    return result


def compare_rows(
    product: Callable[[int], torch.Tensor | None], rows: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the product of all rows, and for fewer rows the share of results that differ."""
    whole = product(rows)
    assert whole is not None
    shares = {}
    for count in COUNTS:
        part = product(count) if count < rows else None
        if part is not None:
            shares[str(count)] = different(part, whole[:count])
    return whole, shares


def different(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the share of elements that are not equal."""
    return (a != b).double().mean().item()


def kernels() -> dict[str, Any]:
    """Compare each engine's kernel with the formulas that it may compute, on a GPU."""
    from mismatch_reference import rms_norm, rotate

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=generator).bfloat16()

    rows, hidden, heads, size = 1024, 4096, 32, 128
    x, residual, weight = normal(rows, hidden), normal(rows, hidden), normal(hidden).abs()
    total = x.float() + residual.float()
    norms = {
        f"{name}, rounded {way}": rms_norm(read.float(), weight, 1e-6, way)
        for name, read in (("float32 sum", total), ("BF16 sum", total.bfloat16()))
        for way in ("once", "twice")
    }

    def among(result: torch.Tensor, formulas: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: different(result, formula) for name, formula in formulas.items()}

    found: dict[str, Any] = {
        "torch rms_norm": among(
            torch.nn.functional.rms_norm(total.bfloat16(), (hidden,), weight, 1e-6), norms
        )
    }
    from fp8rl.kernels.norm import rms_norm_quantize
    from fp8rl.numerics import quantize_swiglu
    from fp8rl.numerics.triton.activations import quantize_rows, silu_and_mul

    codes, scales, _ = rms_norm_quantize(x, residual, weight, 1e-6, "fp32")
    wanted = {name: quantize_group(y).codes.view(torch.uint8) for name, y in norms.items()}
    found["norm with quantization (rollout)"] = among(codes.view(torch.uint8), wanted)
    gate_up = normal(rows, 2 * hidden)
    codes, scales = quantize_rows(gate_up, "fp32", silu_and_mul=True)
    of_trainer = quantize_swiglu(gate_up, columnwise=False).rowwise
    assert of_trainer is not None
    gate, up = gate_up.chunk(2, -1)
    swiglus = {
        "rounded once": (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16(),
        "rounded twice": torch.nn.functional.silu(gate) * up,
    }
    alone = silu_and_mul(gate_up)
    found["SwiGLU of engines that are not compiled"] = among(alone, swiglus)
    again, _ = quantize_rows(alone, "fp32")
    found["SwiGLU of engines that are not compiled, quantized, and trainer"] = {
        "codes": different(again.view(torch.uint8), of_trainer.codes.view(torch.uint8))
    }
    found["SwiGLU with quantization, rollout and trainer"] = {
        "codes": different(codes.view(torch.uint8), of_trainer.codes.view(torch.uint8)),
        "scales": different(scales.t()[:rows], of_trainer.scale_inv),
    }
    angles = torch.outer(
        torch.arange(rows, device="cuda").float(),
        1.0 / 1e6 ** (torch.arange(size // 2, device="cuda").float() / (size // 2)),
    )
    q = normal(rows, heads, size)
    rotations = {way: rotate(q, angles[:, None], way) for way in ("once", "each", "float32")}
    formulas = {"norm": norms, "rotary": rotations, "SwiGLU": swiglus}
    rotated: Tensors = {}
    for library, check in (
        ("vLLM", partial(_of_vllm, gate_up=gate_up)),
        ("fp8rl", _of_fp8rl),
        ("TransformerEngine", _of_transformer_engine),
    ):
        try:
            results = check(x, residual, weight, q, angles)
        except Exception as error:  # not installed, or another signature
            found[library] = {"failed": f"{type(error).__name__}: {error}"}
            continue
        for name, result in results.items():
            found[f"{library}'s {name}"] = among(result, formulas[name.split()[0]])
            if name.startswith("rotary"):
                rotated[f"{library}'s {name}"] = result
    found["rotary, by pairs"] = {
        f"{one} and {other}": different(rotated[one], rotated[other])
        for one, other in combinations(rotated, 2)
    }
    try:
        found["norm and rotation of a query in one compiled function"] = _behind_a_norm(q, angles)
    except Exception as error:  # no vLLM
        found["norm and rotation"] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def _of_vllm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    q: torch.Tensor,
    angles: torch.Tensor,
    gate_up: torch.Tensor,
) -> Tensors:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    rotated, key = q.flatten(1).clone(), q.flatten(1).clone()
    cache = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
    positions = torch.arange(len(q), device="cuda")
    ops.rotary_embedding(positions, rotated, key, q.shape[-1], cache, True)
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, (x.float() + residual.float()).bfloat16(), weight, 1e-6)
    added, stored = x.clone(), residual.clone()
    torch.ops._C.fused_add_rms_norm(added, stored, weight, 1e-6)
    activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    torch.ops._C.silu_and_mul(activated, gate_up)
    return {
        "rotary kernel": rotated.view_as(q),
        "norm kernel": normed,
        "norm kernel with residual": added,
        "SwiGLU kernel": activated,
    }


def _rotary_modules(length: int, size: int) -> tuple[Any, Any]:
    """Return vLLM's rotary embedding and that with cos and sin in float32."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vllm_fp8rl.kernels.rotary import Float32Rotary

    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        rope = get_rope(size, length, True, {"rope_theta": 1e6}, torch.bfloat16)
        return rope, Float32Rotary(rope)


def _of_fp8rl(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    q: torch.Tensor,
    angles: torch.Tensor,
) -> Tensors:
    _, ours = _rotary_modules(len(q), q.shape[-1])
    positions, flat = torch.arange(len(q), device="cuda"), q.flatten(1)
    kernel, _ = ours.forward_cuda(positions, flat.clone(), flat.clone())
    compiled, _ = torch.compile(ours.forward_native, fullgraph=True)(positions, flat, flat)
    return {"rotary kernel": kernel.view_as(q), "rotary compiled": compiled.view_as(q)}


def _behind_a_norm(q: torch.Tensor, angles: torch.Tensor) -> dict[str, float]:
    """Compare with the formula that rounds the norm and then the rotation, which trainers have."""
    from mismatch_reference import rms_norm, rotate
    from vllm.ir.ops import rms_norm as of_vllm

    weight = torch.rand(q.shape[-1], device="cuda").bfloat16()
    normed = rms_norm(q.float(), weight, 1e-6, "once")
    positions = torch.arange(len(q), device="cuda")
    shares = {}
    for name, way, rope in zip(
        ("vLLM", "fp8rl"), ("once", "float32"), _rotary_modules(len(q), q.shape[-1]), strict=True
    ):

        def function(q: torch.Tensor, rope: Any = rope) -> torch.Tensor:
            heads = of_vllm.impls["native"].impl_fn(q, weight, 1e-6)
            return rope.forward_native(positions, heads.flatten(1))[0].view_as(q)

        result = torch.compile(function, fullgraph=True)(q)
        shares[name] = different(result, rotate(normed, angles[:, None], way))
    return shares


def _of_transformer_engine(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    q: torch.Tensor,
    angles: torch.Tensor,
) -> Tensors:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    norm = te.RMSNorm(x.shape[-1], eps=1e-6, device="cuda").to(torch.bfloat16)
    norm.weight.data.copy_(weight)
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    fused = apply_rotary_pos_emb(q[:, None], freqs, tensor_format="sbhd", fused=True)
    return {
        "norm": norm((x.float() + residual.float()).bfloat16()).detach(),
        "rotary kernel": fused[:, 0],
    }


def prompts(tokens: int = 8192, heads: int = 32, kv_heads: int = 8) -> dict[str, Any]:
    """Time FlashAttention 3 over prompts in E4M3 and over dequantized keys and values.

    Returns:
        for each length of prompt: milliseconds of one layer's attention over ``tokens`` tokens, and
        the relative error of each against float32 attention over the same codes.
    """
    from mismatch_reference import attend
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    size, scale = 128, 2.0**-6
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(tokens, count, size, device="cuda", generator=generator).bfloat16()

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)

    def encode(x: torch.Tensor) -> torch.Tensor:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    k_codes, v_codes = encode(k), encode(v)
    one = torch.tensor(scale, device="cuda")
    found = {}
    for length in (512, 2048, 8192):
        batch = tokens // length
        starts = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
        common = {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": length,
            "max_seqlen_k": length,
            "softmax_scale": size**-0.5,
            "causal": True,
            "fa_version": 3,
        }
        descale = one.expand(batch, kv_heads)

        def in_fp8(common: Any = common, descale: Any = descale) -> torch.Tensor:
            queries, _ = ops.scaled_fp8_quant(q.flatten(1), one)
            return flash_attn_varlen_func(
                queries.view_as(q),
                k_codes,
                v_codes,
                q_descale=descale,
                k_descale=descale,
                v_descale=descale,
                **common,
            )

        def dequantized(common: Any = common) -> torch.Tensor:
            keys, values = k_codes.bfloat16() * scale, v_codes.bfloat16() * scale
            return flash_attn_varlen_func(q, keys, values, **common)

        def plain(common: Any = common) -> torch.Tensor:
            return flash_attn_varlen_func(q, k, v, **common)

        rows: dict[str, Any] = {}
        exact = None
        if length == 512:
            one_head = (
                (x[:length].float() if x is q else encode(x)[:length].float() * scale)
                for x in (q, k, v)
            )
            q1, k1, v1 = (x[:, :1].transpose(0, 1)[None] for x in one_head)
            exact = attend(q1.bfloat16(), k1, v1, "float32")[0, 0]
        for name, call in (("fp8", in_fp8), ("dequantized", dequantized), ("bf16", plain)):
            row = {"ms": cold_ms(call, 20)}
            if exact is not None:
                error = call()[:length, 0].float() - exact
                row["error"] = (error.norm() / exact.norm()).item()
            rows[name] = row
        found[str(length)] = rows
    return found


if __name__ == "__main__":
    main()
