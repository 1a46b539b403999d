"""Every Triton kernel compiles for each kind of GPU that may run it, down to its machine code.

No GPU is needed: the plugins' functions are called with tensors on the CPU, and what they would
launch is compiled for another machine. What the kernels compute there is not looked at.
"""

# ruff: noqa: E402 - triton is imported after it was looked for

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.numerics import BLOCK, FP8_DTYPE, Addresses, ExpertRows, Quantized
from support.devices import INTERPRETED
from support.shapes import DTYPES, PACKED, SPLITS, packed

triton = pytest.importorskip("triton", reason="needs triton")
if INTERPRETED:
    pytest.skip("needs Triton's compiler: unset TRITON_INTERPRET", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = {(8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
"""Bytes that a program may have, by compute capability (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""
SIDES = [(True, True), (True, False), (False, True)]


class Machine:
    """What Triton asks the driver of a GPU for when it compiles."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.number = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)


def modules() -> list[Any]:
    """Those of all packages that define kernels."""
    found = []
    for folder in (ROOT / "plugins", ROOT):
        for file in folder.glob("*fp8rl*/**/*.py" if folder == ROOT else "fp8rl/**/*.py"):
            if "@triton.jit" in file.read_text(encoding="utf-8"):
                found.append(".".join(file.relative_to(folder).with_suffix("").parts))
    return [importlib.import_module(name) for name in sorted(found)]


def kernels() -> dict[str, JITFunction]:
    """All of them by name, functions that only other kernels call too."""
    found = {}
    for module in modules():
        for name, value in vars(module).items():
            kernel = value.fn if isinstance(value, Autotuner) else value
            if isinstance(kernel, JITFunction) and kernel.fn.__module__ == module.__name__:
                found[f"{module.__name__}.{name}"] = kernel
    return found


def with_callees(kernel: JITFunction, seen: set[JITFunction]) -> set[JITFunction]:
    """``seen``, the kernel and all it calls."""
    if kernel not in seen:
        seen.add(kernel)
        for name in kernel.fn.__code__.co_names:
            callee = kernel.fn.__globals__.get(name)
            if isinstance(callee, JITFunction):
                with_callees(callee, seen)
    return seen


def on(capability: tuple[int, int], patch: pytest.MonkeyPatch, launch: Callable[..., Any]) -> None:
    """Make launches of kernels call ``launch``, as for a GPU of a capability."""
    packed_module = importlib.import_module("fp8rl.numerics.triton.packed")
    patch.setattr(packed_module, "has_packed_maximum", lambda device: capability >= (9, 0))
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if "NATIVE" in options:  # instructions of a GPU, not what the interpreter knows
            options["NATIVE"] = True
        launch(kernel, args, options)

    def tune(tuner: Autotuner, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for config in tuner.configs:
            config.pre_hook({**dict(zip(tuner.arg_names, args, strict=False)), **config.kwargs})
            tuner.fn.run(*args, grid=grid, warmup=True, **options, **config.all_kwargs())

    patch.setattr(JITFunction, "run", run)
    patch.setattr(Autotuner, "run", tune)


def quantize() -> None:
    from fp8rl.numerics.triton import dual, multi_tensor, quantize

    whole, rows, odd = (256, 384), (130, 256), (129, 257)
    for shape, dtype, form in (
        (whole, torch.bfloat16, "fp32"),
        (whole, torch.bfloat16, "pow2"),
        (whole, torch.float32, "pow2"),
        (rows, torch.bfloat16, "pow2"),
        (odd, torch.float16, "fp32"),
        (odd, torch.bfloat16, "pow2"),
    ):
        x = torch.zeros(shape, dtype=dtype)
        quantize.quantize_group(x, 128, form)
        multi_tensor.quantize_blocks([(x, quantize.quantize_block(x, BLOCK, form))], BLOCK, form)
        for sides in SIDES[: 1 if form == "fp32" else 3]:
            dual.quantize_operand(x, form, *sides)
            dual.quantize_weight(x, form, *sides)
    flat = [torch.zeros(1 << 18, dtype=dtype) for dtype in (*DTYPES, FP8_DTYPE)]
    multi_tensor.start_finite_check(flat)
    multi_tensor.start_finite_check([x[1:] for x in flat])


def swiglu() -> None:
    from fp8rl.numerics.triton import activations, swiglu

    for rows, width, form in ((256, 384, "fp32"), (203, 384, "pow2"), (9, 192, "pow2")):
        h = torch.zeros(rows, 2 * width).bfloat16()
        grad = torch.zeros(rows, width).bfloat16()
        for sides in SIDES:
            swiglu.quantize_swiglu(h, form, *sides)
            swiglu.quantize_swiglu_grad(grad, h, form, *sides)
        for x, silu in ((h, True), (grad, False)):
            activations.quantize_rows(x, form, silu_and_mul=silu)
            activations.quantize_rows(x.repeat(100, 1), form, silu_and_mul=silu)
    swiglu.quantize_swiglu(h.half(), form, True, False)
    swiglu.quantize_swiglu_grad(grad.half(), h.half(), form, True, False)


def experts() -> None:
    from fp8rl.kernels import experts as routed
    from fp8rl.numerics.triton import grouped

    rows = ExpertRows(SPLITS[0], 128)
    for width, form in ((384, "fp32"), (384, "pow2"), (200, "pow2")):
        x = torch.zeros(sum(SPLITS[0]), width).bfloat16()
        weights = [torch.zeros(256, width).bfloat16() for _ in SPLITS[0]]
        for sides in SIDES:
            grouped.quantize_grouped(x, rows, form, *sides)
            grouped.quantize_weights(weights, form, *sides, Addresses())
    grouped.place_boundaries(x, rows)
    x, weight = torch.zeros(5, 2048).bfloat16(), torch.zeros(128, 2048).bfloat16()
    factors, chosen = routed.choose_experts(routed.router_logits(x, weight), 8)
    routed.sum_rows(weight, chosen, factors)
    routed.sum_rows(weight, chosen)


def keys_and_values() -> None:
    from fp8rl.numerics.triton import amax, kv_cache
    from vllm_fp8rl.attention.pages.int8_layout import int8_pages
    from vllm_fp8rl.attention.pages.int8_write import write_int8

    for dtype, shape in zip(DTYPES, PACKED, strict=False):
        q, k, v = packed(*shape, dtype)
        amax.amax_into(torch.zeros(3), [q.flatten(3), k, v])
        kv_cache.fake_quantize_kv(k, v, torch.ones(2), torch.zeros(2, dtype=torch.int64))
        kv_cache.fake_quantize_int8_kv(k, v)
    for heads in (8, 3):
        pages = int8_pages(torch.zeros(4, 2, 16, heads, 132).to(torch.int8), heads, 128)
        new = torch.zeros(5, heads, 128).bfloat16()
        write_int8(new, new, pages, torch.zeros(5, dtype=torch.int64))


def attention() -> None:
    from fp8rl.kernels import attention, paged

    starts = torch.tensor([0, 40, 80], dtype=torch.int32)
    lengths, table = starts.diff(), torch.zeros(2, 200, dtype=torch.int32)
    for size, group in ((128, 4), (256, 1)):
        cache = torch.zeros(400, 16, 2, size)
        query = torch.zeros(80, 2 * group, size).bfloat16()
        tokens = torch.zeros(80, 2, size).bfloat16()
        for kind, scale in (
            (FP8_DTYPE, torch.ones(1)),
            (torch.uint8, torch.ones(400, 16, 2)),
            (torch.bfloat16, None),
        ):
            pages = (cache.to(kind), cache.to(kind), table)
            scales = {"k_scale": scale, "v_scale": scale}
            for splits, ones in ((2, None), (8, None), (8, paged.ones_like_codes(pages[0]))):
                options = {"softmax_scale": 0.1, "out": query[:2], "splits": splits, "ones": ones}
                paged.decode(query[:2], *pages, lengths, **scales, **options)
            copy = paged.copy_pages(*pages, lengths, keys=80, longest=40, **scales)
            # `exact`, which alone calls it, is refused but on Hopper; heads of 256 take 102 KB.
            if size == 128 or torch.cuda.get_device_capability() in ((9, 0), (10, 0)):
                attention.attend(query, copy, starts, longest_query=40, softmax_scale=0.1)
            if scale is not None:
                sizes = {"tokens": 80, "longest": 40, "dtype": torch.bfloat16}
                paged.dequantize_pages(*pages, starts, **sizes, **scales)
        for of_layer in (torch.ones(2), None):
            attention.copy_tokens(tokens, tokens, starts, longest=40, scales=of_layer)


def rows() -> None:
    from fp8rl.kernels import logprobs as sampled
    from fp8rl.kernels import norm
    from fp8rl.kernels.rotary import rotate
    from fp8rl.numerics.triton import logprobs

    for columns in (64, 576, 4096):
        x, weight = torch.zeros(5, columns).bfloat16(), torch.ones(columns).bfloat16()
        norm.rms_norm_and_roots(x, weight, 1e-6)
        norm.add_rms_norm(x, x, weight, 1e-6)
        norm.rms_norm_quantize(x, None, weight, 1e-6, "fp32")
        norm.rms_norm_quantize(x, x, weight, 1e-6, "pow2")
    for size in (64, 128):
        weight = torch.ones(size).bfloat16()
        q, k = (torch.zeros(5, heads, size).bfloat16() for heads in (32, 8))
        for norms in ((weight, weight, 1e-6), None):
            rotate(q, k, torch.arange(5), torch.zeros(64, size), norms=norms)
    for dtype, words in ((torch.bfloat16, 151_936), (torch.float32, 257)):
        logits, ids = torch.zeros(2, 3, words, dtype=dtype), torch.zeros(2, 3, dtype=torch.int64)
        sampled.token_logprobs(logits, ids)
        largest, total, _ = logprobs.row_sums(logits, ids)
        logprobs.logprob_gradient(logits, ids, largest, total, total)


def products() -> None:
    from fp8rl.gemm.triton_gemm import TritonBackend

    backend = TritonBackend()
    for m, n, k in ((256, 512, 384), (130, 257, 192)):
        groups = -(-k // 128)
        of_rows, of_columns = (
            Quantized(torch.zeros(size, k).to(FP8_DTYPE), torch.ones(groups, size).t())
            for size in (m, n)
        )
        blocks = Quantized(of_columns.codes, torch.ones(-(-n // 128), groups))
        for dtype in (torch.bfloat16, torch.float32):
            backend.fprop(of_rows, blocks, dtype)
            backend.wgrad(of_rows, of_columns, dtype)
            backend.wgrad(of_rows, of_columns, dtype, torch.zeros(m, n, dtype=dtype))


CASES = [quantize, swiglu, experts, keys_and_values, attention, rows, products]


def test_every_kernel_is_among_them(monkeypatch):
    launched: set[JITFunction] = set()
    on((9, 0), monkeypatch, lambda kernel, args, options: launched.add(kernel))
    for case in CASES:
        case()
    seen: set[JITFunction] = set()
    for kernel in launched:
        with_callees(kernel, seen)
    missing = [name for name, kernel in kernels().items() if kernel not in seen]
    assert not missing, "add launches of these to CASES, or remove them"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("capability", SHARED_MEMORY, ids="sm_{0[0]}{0[1]}".format)
def test_kernels_compile(capability, case, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Machine(capability))
    made: list[tuple[Any, str]] = []
    compile_it = JITFunction.run

    def launch(kernel: JITFunction, args: Any, options: dict[str, Any]) -> None:
        found = compile_it(kernel, *args, grid=None, warmup=True, **options)
        made.append((found, f"{kernel.__name__}{options}"))

    # Threads suffice: all but a tenth of a compilation runs without Python's lock.
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        on(capability, monkeypatch, launch)
        case()
    failures = {}
    for found, name in made:
        try:
            compiled = found.result() if isinstance(found, FutureKernel) else found
        except Exception as error:
            failures[name] = f"{error.__cause__ or ''} {error}"[:1000]
            continue
        if "cubin" not in compiled.asm or compiled.metadata.shared > SHARED_MEMORY[capability]:
            failures[name] = f"{compiled.metadata.shared} bytes of shared memory"
    capfd.readouterr()  # of a kernel that does not compile Triton prints thousands of lines
    assert made and not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())
