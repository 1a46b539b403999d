"""A model filled from Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fp8rl.errors import CheckpointError
from megatron_fp8rl.export.mapping import (
    EMBEDDING,
    HEAD,
    ModelChunks,
    pairs_of,
    read_model,
    whole_stream,
)


def load_hf(
    model_chunks: ModelChunks,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    vocab_size: int | None = None,
    allow_cast: bool = False,
) -> None:
    """Load Hugging Face tensors into a model: the inverse of :func:`export_hf`.

    This is a collective over the pipeline group: every rank calls it with all tensors of the model
    and takes its own part. An optimizer that exists already keeps its float32 masters until its
    ``reload_model_params()`` is called.

    Args:
        model_chunks: as in :func:`export_hf`.
        tensors: name -> tensor. A lazy mapping is read twice, an iterable is kept in memory.
            ``lm_head.weight`` may be present for tied embeddings if it equals them.
        vocab_size: rows of the Hugging Face vocabulary where the model's is padded; the padding
            rows are set to zero.
        allow_cast: permit a dtype that loses precision, such as float32 into bfloat16.

    Raises:
        CheckpointError: a tensor is missing, unknown, given twice, wrongly shaped or of a dtype
            that would lose precision. Nothing has been changed then.
        UnsupportedError: the model has a parameter without a rule, an adapter, or no memory yet.
    """
    mapping, parameters = read_model(model_chunks, vocab_size)
    given = tensors if isinstance(tensors, Mapping) else _collect(tensors)
    expected = {
        name: (shape, entry.dtype)
        for _, entry in whole_stream(mapping, parameters)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    _check_names(given, expected, optional=HEAD.names if mapping.tied else ())
    for name, (shape, dtype) in expected.items():
        _check_tensor(name, given[name], shape, dtype, allow_cast)
    if mapping.tied and HEAD.names[0] in given:
        _check_tied(given)
    with torch.no_grad():
        for own in parameters:
            parts = [given[name] for name in own.entry.names]
            if own.param.dtype != own.entry.dtype:  # a router's bias, which a wrapper has cast
                own.param.data = own.param.data.to(own.entry.dtype)
            own.param.copy_(mapping.pack(own.rule, parts, own.param.shape[0]))


def _collect(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    for name, tensor in pairs_of(tensors):
        if name in given:
            raise CheckpointError(f"Tensor '{name}' is given twice; send each tensor once.")
        given[name] = tensor
    return given


def _check_names(given: Mapping[str, Tensor], expected: Iterable[str], optional: Iterable) -> None:
    known = set(expected)
    for problem, names in (
        ("missing", known - set(given)),
        ("unknown to this model", set(given) - known - set(optional)),
    ):
        if names:
            raise CheckpointError(
                f"{len(names)} tensor(s) are {problem}, the first is '{min(names)}'; give exactly "
                "the tensors of the model's Hugging Face checkpoint."
            )


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, allow_cast: bool
) -> None:
    if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout != torch.strided:
        what = "without values (meta)" if getattr(tensor, "is_meta", False) else "sparse"
        what = what if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise CheckpointError(f"Tensor '{name}' is {what}; give a dense torch.Tensor with values.")
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"Tensor '{name}' has shape {tuple(tensor.shape)} where the model needs {shape}; give "
            "a checkpoint of this model (and vocab_size where its vocabulary is padded)."
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CheckpointError(
            f"Tensor '{name}' is {tensor.dtype}; give the unquantized checkpoint, the trainer "
            "keeps its weights in high precision."
        )
    if not allow_cast and torch.promote_types(tensor.dtype, dtype) != dtype:
        raise CheckpointError(
            f"Tensor '{name}' is {tensor.dtype} and would lose precision in a {dtype} parameter; "
            "convert the checkpoint or pass allow_cast=True."
        )


def _check_tied(given: Mapping[str, Tensor]) -> None:
    head, embedding = given[HEAD.names[0]], given[EMBEDDING.names[0]]
    if head is not embedding and not torch.equal(head, embedding):
        raise CheckpointError(
            f"'{HEAD.names[0]}' differs from '{EMBEDDING.names[0]}', which the model ties; "
            "build the model with untied embeddings or drop the tensor."
        )
