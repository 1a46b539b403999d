"""Report what an engine would do with a model and a recipe here, without loading weights.

vLLM's own functions make the configuration and choose kernels and the attention backend, so the
report shows what an engine with the same arguments does. Importing this imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from pydantic import ValidationError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.selector import get_attn_backend

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import Fp8RLError
from fp8rl.listing import number_ranges
from fp8rl.models.pins import ALWAYS_BF16, PinRow
from fp8rl.models.sizes import GIB, Sizes, gib, mib
from fp8rl.plugins.adapters import Diagnosis, Section
from fp8rl.reading import explain
from vllm_fp8rl.compat import TESTED, installed_version
from vllm_fp8rl.engine.rank_state import RankState
from vllm_fp8rl.kernels.linear.choice import select_kernel
from vllm_fp8rl.quantization.checks import check_widths
from vllm_fp8rl.quantization.kv_cache import (
    FP8_KV_DTYPES,
    INT8_KV_DTYPE,
    check_backend,
    check_kv_cache_dtype,
)
from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES

_NO_FP8_UNITS = "no FP8 units: a float32 product of dequantized codes"


def examine(model: Path, recipe: Recipe, ranks: int) -> Diagnosis:
    """Report kernels, attention backend, pins and memory of an engine.

    Args:
        model: folder with a ``config.json``; weights and a tokenizer are not needed.
        recipe: recipe that the engine would run.
        ranks: tensor parallel size.

    Returns:
        A section per topic. What would stop the engine is in ``problems``; nothing is raised.
    """
    vllm_fp8rl.register()
    problems: list[str] = []
    sections: list[Section] = []
    try:
        options = vllm_fp8rl.engine_args(recipe)
        # One rank: vLLM makes no configuration for more GPUs than there are.
        engine = EngineArgs(
            str(model), load_format="dummy", skip_tokenizer_init=True, **options
        ).create_engine_config()
        with set_current_vllm_config(engine):
            state = engine.quant_config.resolve()
            sections = _sections(engine, state, ranks, problems)
    except Fp8RLError as error:
        problems.append(str(error))
    except Exception as error:  # whatever vLLM and transformers raise for an unusable config
        problems.append(
            f"vLLM refuses '{model}': {_one_line(error)}; correct its config.json, or use another "
            "model."
        )
    return Diagnosis(
        installed_version(), TESTED, problems=tuple(problems), sections=tuple(sections)
    )


def _sections(
    engine: VllmConfig, state: RankState, ranks: int, problems: list[str]
) -> list[Section]:
    sizes = Sizes(state.spec, ranks)
    unsplit = sizes.split_problem()
    if unsplit is not None:
        problems.append(unsplit)
        return []
    check_widths(state.spec, ranks, expert_parallel=False)
    rows = state.policy.report()
    if not state.recipe.rollout:
        rows = [_in_bf16(row) for row in rows]
    return [
        _linears(engine, state, sizes, rows, ranks, problems),
        _attention(engine, sizes, problems),
        _memory(engine, state.recipe, sizes, rows, ranks, problems),
    ]


def _in_bf16(row: PinRow) -> PinRow:
    return PinRow(row.name, row.layer, row.kind, "bf16", row.reason or "rollout: false")


def _linears(
    engine: VllmConfig,
    state: RankState,
    sizes: Sizes,
    rows: list[PinRow],
    ranks: int,
    problems: list[str],
) -> Section:
    device = torch.device(current_platform.device_type)
    dtype = engine.model_config.dtype
    cells = []
    for kind in dict.fromkeys(row.kind for row in rows if row.kind not in ALWAYS_BF16):
        mine = [row for row in rows if row.kind == kind]
        fp8 = [row.layer for row in mine if row.precision == "fp8"]
        pinned = sorted({(row.reason, row.layer or 0) for row in mine if row.precision == "bf16"})
        shape, kernel, why = "", "-", ""
        if kind == "experts":
            if fp8:
                kernel, why = _experts_kernel(engine, state.recipe, device)
        else:
            gemm = sizes.linear(kind)
            shape = f"{gemm.out_features} x {gemm.in_features}"
            if fp8:
                try:
                    kernel = select_kernel(device, gemm, state.recipe, dtype).backend
                    why = _why(device, gemm, dtype)
                except Fp8RLError as error:
                    kernel, why = "none", ""
                    problems.append(f"{kind}: {error}")
        reasons = [
            f"{_numbers(layer for _, layer in group)} ({reason})"
            for reason, group in groupby(pinned, key=lambda pair: pair[0])
        ]
        cells.append((kind, shape, _numbers(fp8), ", ".join(reasons) or "-", kernel, why))
    return Section(
        f"linear layers, tensor parallel size {ranks}",
        ("module", "weight on a rank", "layers in FP8", "layers in BF16", "FP8 kernel", "why"),
        tuple(cells),
    )


def _experts_kernel(engine: VllmConfig, recipe: Recipe, device: torch.device) -> tuple[str, str]:
    if device.type != "cuda":
        return "cpu", _NO_FP8_UNITS
    asked = engine.kernel_config.moe_backend
    if asked == "auto":
        pow2 = recipe.activations.scale_format == "pow2"
        if pow2 or torch.cuda.get_device_capability(device) != (9, 0):
            return "triton", "the first choice; vLLM looks at the experts when the engine starts"
        return "triton, deep_gemm", (
            "DeepGEMM where experts have many rows, as of prompts, if it takes them when the "
            "engine starts (nvcc, more than 512 columns)"
        )
    return asked, "as moe_backend says"


def _why(device: torch.device, shape: Any, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return _NO_FP8_UNITS
    from vllm_fp8rl.kernels.linear.block_gemm import unsupported_reasons

    reasons = unsupported_reasons(shape, dtype)
    return "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "the fastest fits"


def _attention(engine: VllmConfig, sizes: Sizes, problems: list[str]) -> Section:
    cache = engine.cache_config.cache_dtype
    model = engine.model_config
    head_size = model.get_head_size() if model.use_mla else sizes.head_size  # of latents
    backend = get_attn_backend(
        head_size, model.dtype, cache, use_mla=model.use_mla, num_heads=sizes.heads
    )
    name = backend.get_name()
    facts = [("backend", name), ("implementation", f"{backend.__module__}.{backend.__name__}")]
    if name.startswith("FLASH_ATTN"):
        version = get_flash_attn_version(head_size=head_size)
        facts.append(("FlashAttention", f"version {version}"))
    quantized = check_kv_cache_dtype(cache)
    formats = dict.fromkeys(FP8_KV_DTYPES, "E4M3 with a scale a tensor")
    formats[INT8_KV_DTYPE] = "INT8 with a scale for each token and head"
    facts.append(("KV cache", f"{cache}: {formats[cache]}" if cache in formats else cache))
    if quantized:
        try:
            check_backend(name, engine.compilation_config)
        except Fp8RLError as error:
            problems.append(str(error))
        else:
            graphs = ", in CUDA graphs too" if current_platform.is_cuda() else ""
            facts.append(("new KV scales", f"take effect in the next step{graphs}"))
    return Section("attention", ("", ""), tuple(facts))


def _memory(
    engine: VllmConfig,
    recipe: Recipe,
    sizes: Sizes,
    rows: list[PinRow],
    ranks: int,
    problems: list[str],
) -> Section:
    itemsize = engine.model_config.dtype.itemsize
    # A CPU keeps rounded values in the model's dtype.
    need = sizes.bytes(
        rows, itemsize, recipe.kv_cache.dtype if torch.cuda.is_available() else "auto"
    )
    cells = [
        ("FP8 weights", gib(need.codes)),
        ("their scales", mib(need.scales)),
        ("weights in the model's dtype", gib(need.plain)),
        ("KV cache", f"{need.kv_per_token:,} bytes a token"),
        ("staging of a refit", f"a batch of tensors ({mib(BATCH_BYTES)}) or the largest of them"),
    ]
    if torch.cuda.is_available():
        share = engine.cache_config.gpu_memory_utilization
        total = torch.cuda.get_device_properties(0).total_memory
        left = int(total * share) - need.weights
        cells.append(("GPU", f"{gib(total)}, of which vLLM takes {share:.0%}"))
        cells.append(
            (
                "tokens that fit",
                f"{max(0, left // need.kv_per_token):,}, before activations and CUDA graphs",
            )
        )
        if left <= 0:
            problems.append(
                f"The weights take {gib(need.weights)} a rank, more than the {share:.0%} of "
                f"{gib(total)} that vLLM would use; raise the tensor parallel size."
            )
    else:
        cells.append(("tokens in a GiB", f"{GIB // need.kv_per_token:,}"))
    return Section(f"memory of a rank, tensor parallel size {ranks}", ("", ""), tuple(cells))


def _numbers(layers: Iterable[int | None]) -> str:
    return number_ranges(layer for layer in layers if layer is not None) or "-"


def _one_line(error: Exception) -> str:
    """Shorten an error of vLLM, pydantic or transformers to one line without lists of models."""
    if isinstance(error, ValidationError):
        text = explain(error, error.title)
    elif isinstance(error, ValueError | OSError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return shorten(text, 300, placeholder=" ...").rstrip(".")
