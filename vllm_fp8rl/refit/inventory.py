"""What a live vLLM model takes: the HF name, shape and engine parameter of every tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import BLOCK, cdiv
from fp8rl.pinning import FUSED as FUSED_MODULES
from vllm_fp8rl.storage.experts import FUSED, SLOTS, ExpertGrids, stack_of
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight

Kind = Literal["codes", "scales", "plain", "fused"]


@dataclass(frozen=True)
class Entry:
    """One tensor of the HF checkpoint."""

    shape: tuple[int, ...]
    parameter: str
    """Engine parameter that holds it, perhaps fused with others."""
    kind: Kind
    """codes: an FP8 weight, may come as BF16; scales: its ``weight_scale_inv``; fused: one tensor
    for all that it ``covers``; plain: the rest."""
    alias_of: str | None = None
    """HF name of the tensor that this one is tied to; it need not be sent."""
    covers: tuple[str, ...] = ()
    """HF names of the tensors that this one may come instead of."""
    local: bool = True
    """This rank holds a part of it; an expert's tensors, another rank may hold."""
    codes_fit: bool = True
    """FP8 codes of it would keep their values: blocks of the HF tensor are this rank's blocks."""

    @property
    def required(self) -> bool:
        return self.kind not in ("scales", "fused") and self.alias_of is None


def inventory(model: torch.nn.Module) -> dict[str, Entry]:
    """HF name -> entry, for every parameter of a model but its KV-cache scales.

    Raises:
        UnsupportedError: a pipeline-parallel engine, whose ranks hold parts of the model.
    """
    if get_pp_group().world_size > 1:
        raise UnsupportedError(
            "A refit of a pipeline-parallel engine is not supported; use tensor_parallel_size."
        )
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    entries: dict[str, Entry] = {}
    owners: dict[int, str] = {}
    for path, module in _modules(model).items():
        if hasattr(module, "kv_cache_dtype"):  # an attention layer: kv_cache.py knows its scales
            continue
        if isinstance(module, RoutedExperts):
            entries |= _experts(path, module)
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            owner = owners.setdefault(id(parameter), name)
            alias = owner if owner != name else None
            tensors = _hf_tensors(path, leaf, module, parameter, fused)
            fits = _codes_fit(module, parameter, len(tensors))
            for (hf_name, shape), fit in zip(tensors, fits, strict=True):
                entries[hf_name] = Entry(shape, name, _kind(parameter), alias, codes_fit=fit)
    return entries


def _modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every module by its path; a vocabulary matrix by each of its paths.

    Up to vLLM 0.27.1 a tied ``lm_head`` is the module ``embed_tokens`` itself.
    """
    modules = dict(model.named_modules())
    for path, parent in list(modules.items()):
        for leaf, child in parent._modules.items():
            if isinstance(child, VocabParallelEmbedding):
                modules.setdefault(f"{path}.{leaf}" if path else leaf, child)
    return modules


def _experts(path: str, module: RoutedExperts) -> dict[str, Entry]:
    """The tensors of a layer's experts, of every rank: each by itself, and all in one."""
    layout = module.w13_weight.grid.layout
    quantized = isinstance(module.w13_weight.grid, ExpertGrids)
    entries: dict[str, Entry] = {}
    for slot in SLOTS:
        parameter = f"{path}.{stack_of(slot)}"
        shape, fits = layout.shard(slot).full, layout.codes_fit(slot)
        for expert in range(layout.total):
            name, local = layout.hf_name(expert, slot), expert in layout.local
            kind: Kind = "codes" if quantized else "plain"
            entries[name] = Entry(shape, parameter, kind, local=local, codes_fit=fits)
            if quantized:
                scales = (cdiv(shape[0], BLOCK[0]), cdiv(shape[1], BLOCK[1]))
                entries[f"{name}_scale_inv"] = Entry(
                    scales, f"{parameter}_scale_inv", "scales", local=local, codes_fit=fits
                )
    for leaf, slots in FUSED.items():
        rows, columns = layout.shard(slots[0]).full
        entries[f"{layout.name}.{leaf}"] = Entry(
            (layout.total, len(slots) * rows, columns),
            f"{path}.{stack_of(slots[0])}",
            "fused",
            covers=tuple(layout.hf_name(e, slot) for slot in slots for e in range(layout.total)),
        )
    return entries


def _codes_fit(module: torch.nn.Module, parameter: torch.nn.Parameter, count: int) -> list[bool]:
    """Of each of the HF tensors of a parameter, :attr:`Entry.codes_fit`."""
    if not isinstance(module, LinearBase) or not isinstance(parameter, (Fp8Weight, Fp8Scale)):
        return [True] * count
    grid, rows = parameter.grid, _rows(module)
    if len(rows) != count:  # fused in the checkpoint too, with blocks of its own
        return [False] * count
    return [
        grid.codes_fit(start, parameter.origin((full, module.input_size), grid.shape_of(start)))
        for start, full in zip(grid.starts, rows, strict=True)
    ]


def _kind(parameter: torch.nn.Parameter) -> Kind:
    if isinstance(parameter, Fp8Weight):
        return "codes"
    return "scales" if isinstance(parameter, Fp8Scale) else "plain"


def _hf_tensors(
    path: str,
    leaf: str,
    module: torch.nn.Module,
    parameter: torch.nn.Parameter,
    fused: dict[str, list[str]],
) -> list[tuple[str, tuple[int, ...]]]:
    """HF names and shapes of the tensors that make one engine parameter."""
    if isinstance(module, VocabParallelEmbedding):
        return [(f"{path}.{leaf}", (module.org_vocab_size, *parameter.shape[1:]))]
    if not isinstance(module, LinearBase):
        return [(f"{path}.{leaf}" if path else leaf, tuple(parameter.shape))]
    parent, _, module_leaf = path.rpartition(".")
    # Qwen3-MoE's own table has gate_up_proj only where the config names the layers without experts.
    parts = fused.get(module_leaf) or FUSED_MODULES.get(module_leaf) or [module_leaf]
    rows = _rows(module)
    if len(parts) != len(rows):  # fused in the checkpoint too
        parts, rows = [module_leaf], [sum(rows)]
    return [
        (f"{parent}.{part}.{leaf}", _full_shape(leaf, count, module.input_size))
        for part, count in zip(parts, rows, strict=True)
    ]


def _rows(module: LinearBase) -> list[int]:
    if isinstance(module, QKVParallelLinear):
        heads = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
        return [count * module.head_size for count in heads]
    if isinstance(module, MergedColumnParallelLinear):
        return list(module.output_sizes)
    return [module.output_size]


def _full_shape(leaf: str, rows: int, columns: int) -> tuple[int, ...]:
    if leaf == "weight_scale_inv":
        return cdiv(rows, BLOCK[0]), cdiv(columns, BLOCK[1])
    return (rows,) if leaf == "bias" else (rows, columns)
