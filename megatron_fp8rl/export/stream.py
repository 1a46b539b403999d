"""A model as a stream of Hugging Face tensors, in the dtype of its parameters or as FP8 codes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from fp8rl import PinPolicy
from fp8rl.errors import UnsupportedError
from fp8rl.models.families import FUSED, SPANS, kind_of
from fp8rl.numerics import BLOCK, mark_inf, quantize_block
from fp8rl.recipe import ScaleFormat
from fp8rl.training.layout import ROW_PARALLEL
from megatron_fp8rl.export.mapping import (
    MappedParameter,
    ModelChunks,
    ParameterMap,
    StreamEntry,
    as_list,
    pairs_of,
    read_model,
    whole_stream,
)

logger = logging.getLogger(__name__)


def export_hf(
    model_chunks: ModelChunks, *, vocab_size: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream a model as Hugging Face tensors, embedding first, then layer by global layer.

    This is a collective: every rank must call it and consume the whole stream, because each tensor
    is gathered over the tensor-parallel group and broadcast over the pipeline group when its turn
    comes. Every rank gets every tensor. At most one Megatron parameter is gathered at a time.
    Parameters of a DistributedDataParallel that gathers late (``overlap_param_gather``) are
    gathered at the call.

    Args:
        model_chunks: a GPTModel, plain or wrapped (Float16Module, DistributedDataParallel), or the
            list of this rank's virtual-pipeline chunks.
        vocab_size: rows of the Hugging Face vocabulary where the model's is padded; the padding
            rows are left out. By default ``config.vocab_size``, which Megatron-Bridge's models
            have; where there is none, all rows of the model.

    Returns:
        Pairs of name and tensor, in the dtype of the parameters, on the model's device. The
        tensors are copies. ``lm_head.weight`` is left out where embeddings are tied.

    Raises:
        UnsupportedError: at the call, for a model with a parameter without a rule, an adapter, or
            no memory yet.
        CheckpointError: at the call, for a bad ``vocab_size`` or missing chunks.
    """
    mapping, parameters = read_model(model_chunks, vocab_size)
    _gather_late_parameters(model_chunks)
    stream = whole_stream(mapping, parameters)
    return _stream(mapping, {p.entry.order: p for p in parameters if p.exported}, stream)


def _gather_late_parameters(model_chunks: ModelChunks) -> None:
    """Gather the new weights where ``overlap_param_gather`` is on.

    Each rank has only its own share of them between an optimizer step and the next forward.
    """
    for chunk in as_list(model_chunks):
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _stream(
    mapping: ParameterMap,
    mine: Mapping[tuple[int, int, int, int], MappedParameter],
    entries: Sequence[tuple[int, StreamEntry]],
) -> Iterator[tuple[str, Tensor]]:
    for owner, entry in entries:
        own = mine.get(entry.order)
        tensors = None
        if own is not None:  # a router's bias is float32, also where a wrapper has cast it
            tensors = [t.to(entry.dtype) for t in mapping.unpack(own.rule, own.param)]
        for index, name in enumerate(entry.names):
            if tensors is not None:
                tensor = tensors[index]
            else:
                tensor = torch.empty(entry.shapes[index], dtype=entry.dtype, device=mapping.device)
            # An expert goes to the other experts' ranks of its stage, then to the other stages.
            if entry.expert is not None and mapping.ep.size() > 1 and mapping.pp.rank() == owner:
                holder = entry.expert // (mapping.config.num_moe_experts // mapping.ep.size())
                _broadcast(tensor, holder, mapping.ep)
            _broadcast(tensor, owner, mapping.pp)
            yield name, tensor


def _broadcast(tensor: Tensor, rank_in_group: int, group: Any) -> None:
    if group.size() > 1:
        source = torch.distributed.get_global_rank(group, rank_in_group)
        torch.distributed.broadcast(tensor, src=source, group=group)


def fp8_wire(
    stream: Iterable[tuple[str, Tensor]],
    policy: PinPolicy,
    scale_format: ScaleFormat = "fp32",
    *,
    tensor_parallel_size: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """Replace the weights that run in FP8 by their codes in a stream of tensors.

    Codes are half the bytes, for a receiver that takes them as they are. In the stream blocks lie
    on each whole Hugging Face matrix, in the rollout on its rank's ``[q; k; v]`` and ``[gate; up]``
    and on its columns of ``o_proj`` and ``down_proj``. If these blocks differ (a matrix, or a
    rank's share of it, is no multiple of 128; or ranks cut the three matrices of an
    ``in_proj_qkv``, whose sizes are not known here), the rollout would have to quantize codes a
    second time, which changes values. Such a weight stays as it came and is quantized once; a
    warning at the end of the stream names it. A receiver that quantizes every tensor (NeMo RL's)
    needs the plain stream.

    Args:
        stream: tensors by name, from :func:`export_hf`.
        policy: pins of the whole model, ``Conversion.policy`` or the same ones.
        scale_format: format of the scales of the 128x128 blocks.
        tensor_parallel_size: tensor-parallel size of the rollout engine.

    Returns:
        ``X.weight`` (float8_e4m3fn) and ``X.weight_scale_inv`` (float32) for FP8 modules, one
        after the other, the codes that the rollout would make of the weight (an infinity becomes a
        NaN code); everything else as it came.

    Raises:
        PinError: while streaming, for a matrix that the policy does not know.
        UnsupportedError: while streaming, for experts that come stacked in one tensor, codes, no
            such ``tensor_parallel_size``, or a ``policy`` that is no PinPolicy.
    """
    if not isinstance(policy, PinPolicy):
        raise UnsupportedError(
            f"The policy is a {type(policy).__name__}; give Conversion.policy, the pins of the "
            "whole model."
        )
    if type(tensor_parallel_size) is not int or tensor_parallel_size < 1:
        raise UnsupportedError(
            f"tensor_parallel_size={tensor_parallel_size!r}: give the number of GPUs of a rollout "
            "engine, 1 or more."
        )
    as_they_came: dict[str, int] = {}
    for name, tensor in pairs_of(stream):
        if not isinstance(tensor, Tensor) or tensor.dtype.itemsize < 2:
            what = f"holds {tensor.dtype}" if isinstance(tensor, Tensor) else "is no torch.Tensor"
            raise UnsupportedError(
                f"'{name}' {what}, which cannot be quantized; give the stream of export_hf, or "
                "another one of tensors in high precision."
            )
        module, _, leaf = name.rpartition(".")
        if tensor.ndim > 2 and kind_of(name) == "experts":
            raise UnsupportedError(
                f"'{name}' stacks the experts of a layer {tuple(tensor.shape)}, which have no FP8 "
                "wire format; export one matrix for each expert, or export BF16."
            )
        if leaf != "weight" or tensor.ndim != 2 or policy.precision(module) != "fp8":
            yield name, tensor
        elif not _has_blocks_of_its_own(module, tensor.shape, tensor_parallel_size):
            kind = re.sub(r"\.\d+\.", ".*.", module)
            as_they_came[kind] = as_they_came.get(kind, 0) + 1
            yield name, tensor
        else:
            codes, scale_inv = quantize_block(mark_inf(tensor), scale_format=scale_format)
            yield name, codes
            yield f"{name}_scale_inv", scale_inv
    if as_they_came:
        logger.warning(
            "fp8_wire sent %d weights without codes, because their rows or columns on a rollout "
            "rank (tensor_parallel_size=%d) are no multiple of 128, or not known to be: %s",
            sum(as_they_came.values()),
            tensor_parallel_size,
            ", ".join(f"{kind} ({count})" for kind, count in as_they_came.items()),
        )


_FUSED_PARTS = tuple(part for parts in FUSED.values() for part in parts)


def _has_blocks_of_its_own(module: str, shape: torch.Size, ranks: int) -> bool:
    """Tell whether every block of a matrix lies on one rank of the rollout, and in no other matrix.

    In a module that is not known here, either dimension may be the one that is cut.
    """
    rows, columns = (size % (block * ranks) == 0 for size, block in zip(shape, BLOCK, strict=True))
    leaf = module.rpartition(".")[2]
    alone = ranks == 1  # and nothing beside it, where the rollout fuses none or has experts
    if leaf in ROW_PARALLEL:
        return alone or columns
    if leaf in SPANS:  # ranks cut each matrix of the tensor, and it does not tell their sizes
        return alone and rows
    if leaf in _FUSED_PARTS:
        return rows or (alone and kind_of(module) == "experts")
    return alone or (rows and columns)
