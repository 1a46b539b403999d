"""Checks of a stream of tensors: what its items are, and whether their memory is unchanged.

A sender may fill one buffer again and again. The tensors of a batch then all hold the last values
when the batch is read, and it looks complete. :class:`Held` copies what waits on the host, and
detects changes on a GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fp8rl.errors import RefitError
from fp8rl.models.families import kind_of

Named = tuple[str, torch.Tensor]


BATCH_BYTES = 16 << 20
"""Tensors are sent to the workers in batches of about this size; a larger one is sent alone."""


class Batch(list[Named]):
    """Tensors that were checked here, to be read before another one is pulled."""


_REMEDY = "yield clones, or have one tensor read at a time (batch_bytes=1)"
_VOCABULARY = {"embed_tokens", "lm_head"}
_FIXED: tuple[type, ...] = (list, tuple, type({}.items()), type(OrderedDict().items()))
"""Collections that already hold all tensors: no code of the sender runs between two of them."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def pulled(tensors: Any) -> Iterator[Named]:
    """Iterate over pairs of HF name and tensor, and check them one by one.

    Raises:
        RefitError: not such an iterable, or a tensor without plain values, such as a DTensor.
    """
    if isinstance(tensors, Mapping):
        raise RefitError("A refit takes pairs of name and tensor, not a mapping; give its items().")
    try:
        stream = iter(tensors)
    except TypeError:
        raise RefitError(
            f"A refit takes pairs of name and tensor, not '{type(tensors).__name__}'; give "
            "state_dict.items(), for example."
        ) from None
    for item in stream:
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise RefitError(
                f"A refit takes pairs of name and tensor, but got '{type(item).__name__}'; give "
                "state_dict.items(), for example."
            )
        name, tensor = item
        if not isinstance(name, str):
            raise RefitError(f"{name!r} is no name of a tensor; send the HF name as a str.")
        problem = _problem(tensor)
        if problem:
            raise RefitError(f"'{name}' {problem}.")
        _require_memory(name, tensor)
        # A negation that torch has put off is no part of the memory, which others read.
        yield name, tensor.resolve_neg() if tensor.is_neg() else tensor


def steady(tensors: Any) -> Batch:
    """Return all of a stream, as one batch; a batch as it is.

    Raises:
        RefitError: see :func:`pulled` and :class:`Held`.
    """
    if isinstance(tensors, Batch):
        return tensors
    held = Held(tensors)
    for item in pulled(tensors):
        held.add(item)
    return held.release()


class Held:
    """Collects tensors of a batch that have not been read yet, and detects changed memory.

    Code of the sender runs before the batch is read, and may write to it. Torch counts its own
    writes, but not those of numpy, of another process, or through ``.data``. So a tensor that waits
    is copied at once if it is on the host, if torch does not count the writes to it, or if it has
    one element, as KV scales have, which may share memory. For others the count is compared.
    Between two tensors of a list no code of the sender runs, so none is copied.

    Args:
        tensors: the stream that they come from.
        kept: nobody writes to the tensors once they have come.
    """

    def __init__(self, tensors: Any, *, kept: bool = False) -> None:
        self._fixed = kept or type(tensors) in _FIXED
        self.items = Batch()
        self._versions: list[int | None] = []

    def add(self, item: Named, *, waits: bool = True) -> None:
        """Add a tensor; with ``waits`` the sender's code runs again before the batch is read."""
        name, tensor = item
        version: int | None = None
        if waits and not self._fixed:
            if not tensor.is_cuda or tensor.numel() == 1 or not _counts_writes(tensor):
                item = name, tensor.detach().clone()
            else:
                version = tensor._version
        self._versions.append(version)
        self.items.append(item)

    def release(self, *coming: Named) -> Batch:
        """Return the batch and begin a new one, for which a tensor may have been pulled already.

        Raises:
            RefitError: the memory of a tensor was written to, freed or used for another one since.
        """
        items, versions = self.items, self._versions
        self.items, self._versions = Batch(), []
        _require_apart([*items, *coming])
        for (name, tensor), version in zip(items, versions, strict=True):
            if version is not None and version != tensor._version:
                last = (coming or items)[-1][0]
                raise RefitError(
                    f"The memory of '{name}' was written to before it was read, by the time that "
                    f"'{last}' had come; {_REMEDY}."
                )
        return items


def _counts_writes(tensor: torch.Tensor) -> bool:
    """Tell whether torch counts the writes to a GPU tensor's memory, those through views included.

    Memory that came through DLPack or from another process is not torch's, which cannot resize it.
    """
    return not tensor.is_inference() and tensor.untyped_storage().resizable()


def _require_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise RefitError if some of a tensor's memory was given back."""
    last = tensor.storage_offset()
    last += sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    short = tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size()
    if short and tensor.numel():
        raise RefitError(f"The memory of '{name}' was freed before it was read; {_REMEDY}.")


def _problem(tensor: Any) -> str:
    """Why a tensor cannot be sent, with the remedy; empty if it can."""
    kind = type(tensor)
    usual = kind in _PLAIN and tensor.layout is torch.strided
    if usual and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested):
        return ""
    if not isinstance(tensor, torch.Tensor):
        return f"is no tensor but '{kind.__name__}'; send torch tensors (torch.as_tensor)"
    if kind not in _PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        if hasattr(tensor, "full_tensor"):
            return f"is a {kind.__name__}, of which a rank has a part; send its full_tensor()"
        return f"is a {kind.__name__} and no plain tensor; send what it stands for (dequantize())"
    if is_lazy(tensor):
        return "has no values yet; send it after the first forward of its lazy module"
    if tensor.is_nested:
        return "is a nested tensor; send each of its parts by its own name"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; send its to_dense()"
    if tensor.is_quantized:
        return "is quantized by torch; send its dequantize()"
    return "has no values (device 'meta'); send a tensor that has" if tensor.is_meta else ""


_Span = tuple[int, int, Named]
"""A tensor, with the address of its first byte and the number of bytes to its last."""


def _require_apart(items: Sequence[Named]) -> None:
    """Raise RefitError for two tensors in the same memory.

    Tensors of one element may share it, which KV scales do; and embedding and output projection
    where they are tied.
    """
    starts = [tensor.data_ptr() for _, tensor in items]
    before: list[_Span] = []
    end = 0  # of all before
    for number in sorted(range(len(items)), key=starts.__getitem__):
        span = _span(items[number])
        start, length, (name, _) = span
        if start >= end:
            before.clear()
            _require_memory(*span[2])
        for other in before:
            if start < other[0] + other[1] and not _may_share(span, other) and _meet(span, other):
                raise RefitError(
                    f"'{name}' came in the memory of '{other[2][0]}', which had not been read yet; "
                    f"{_REMEDY}."
                )
        before.append(span)
        end = max(end, start + length)


def _span(item: Named) -> _Span:
    tensor = item[1]
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes, item
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), item


def _may_share(one: _Span, other: _Span) -> bool:
    (name, tensor), (second, another) = one[2], other[2]
    if max(tensor.numel(), another.numel()) <= 1:
        return True
    kinds = {kind_of(each.removesuffix(".weight")) for each in (name, second)}
    return kinds == _VOCABULARY and one[:2] == other[:2]


def _meet(one: _Span, other: _Span) -> bool:
    """Tell whether two tensors with spans that overlap share a byte: strided ones need not."""
    (starts, length), (others, width) = _runs(one), _runs(other)
    below = torch.searchsorted(others, starts + length) - 1  # the last that begins before an end
    return bool(((below >= 0) & (others[below.clamp(min=0)] + width > starts)).any())


def _runs(span: _Span) -> tuple[torch.Tensor, int]:
    """Return a tensor's bytes as runs: their addresses, ascending, and the length of each."""
    first, _, (_, tensor) = span
    starts, length = torch.tensor([first]), tensor.element_size()
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        distance = step * tensor.element_size()
        if len(starts) == 1 and distance == length:
            length *= size
        elif size > 1 and distance:
            starts = (torch.arange(size)[:, None] * distance + starts).flatten()
    return starts.sort().values, length


def scalars_on_host(weights: Iterable[Named]) -> list[Named]:
    """Return the batch with its one-element GPU tensors, such as KV scales, on the host.

    Their loaders read the value: this waits for the GPU once for all, not once for each.
    """
    batch = list(weights)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, (_, tensor) in enumerate(batch):
        if tensor.is_cuda and tensor.numel() == 1:
            together.setdefault((tensor.device, tensor.dtype), []).append(number)
    for numbers in together.values():
        values = torch.stack([batch[number][1].reshape(()) for number in numbers]).cpu()
        for number, value in zip(numbers, values, strict=True):
            name, tensor = batch[number]
            batch[number] = (name, value.view(tensor.shape))
    return batch


def batches(
    tensors: Iterable[Named], limit: int, *, gpu_factor: int = 1, kept: bool = False
) -> Iterator[Batch]:
    """Yield the tensors in lists of at most ``limit`` bytes; a larger tensor goes alone.

    Args:
        tensors: pairs of name and tensor, read one list at a time.
        limit: largest size of a list in bytes.
        gpu_factor: factor by which a list of GPU tensors may be larger.
        kept: see :class:`Held`.

    Raises:
        RefitError: a name came twice (a batch may travel as a mapping, which would hide it); an
            item that is no name with a plain tensor; or memory that was written to before it was
            read, see :class:`Held`.
    """
    seen: set[str] = set()
    held = Held(tensors, kept=kept)
    size = 0
    for item in pulled(tensors):
        name, tensor = item
        if name in seen:
            raise came_twice(name)
        seen.add(name)
        cost = tensor.nbytes // gpu_factor if tensor.is_cuda else tensor.nbytes
        if held.items and size + cost > limit:
            yield held.release(item)
            size = 0
        size += cost
        held.add(item, waits=size < limit)
        if size >= limit:  # before the next is asked for, which may come in the same memory
            yield held.release()
            size = 0
    if held.items:
        yield held.release()


def came_twice(name: str) -> RefitError:
    """Return the error for a name that comes again."""
    return RefitError(f"'{name}' arrived twice in one refit or reload; send each tensor once.")
