"""Pack batches of tensors as builtins, for workers in other processes.

An engine core in a process of its own decodes only builtins (vLLM's safe default). Tensors on the
host travel as one safetensors buffer. Tensors on a GPU that every worker sees travel as CUDA IPC
handles: a worker reads the sender's memory, so they do not pass the host.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fp8rl.errors import RefitError
from fp8rl.weight_files import DTYPES
from vllm_fp8rl.refit.tensor_stream import Named, came_twice, steady

Place = dict[str, Any]
"""Where a process is. ``host`` is equal for processes that can open each other's handles;
``process`` is its number; ``gpus`` has the UUIDs of the GPUs that it sees, by device index."""

Payload = bytes | dict[str, Any]
"""A safetensors buffer; or ``tensors`` (name -> storage, dtype, offset, size, stride), ``storages``
(each: process -> handle) and ``bytes`` for the tensors that are not on a GPU."""

GPU_BATCH_FACTOR = 16
"""How much larger batches of GPU tensors are that do not pass the host. Each batch waits about
0.6 ms for its check, and a layer of an 8B model is quantized twice in that time."""
_ALIGNMENT = 256


def place() -> Place:
    """Return where this process is."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {"host": _host(), "process": str(os.getpid()), "gpus": [_uuid(i) for i in gpus]}


def pack(batch: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Pack tensors into one safetensors buffer.

    Raises:
        RefitError: see :func:`vllm_fp8rl.refit.tensor_stream.steady`; or a name came twice.
    """
    packed: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in steady(batch):
        if name in packed:
            raise came_twice(name)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.data_ptr() in seen:  # tied weights, equal scales: safetensors wants memory apart
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        packed[name] = tensor
    return save(packed)


class Sender:
    """Packs the batches of one refit.

    GPU tensors are copied into a staging buffer, whose handle is sent: its memory can be shared
    whatever allocator the trainer uses. A tensor that is larger is read from where it is.

    Args:
        places: where each worker is.
        staging_bytes: size of the staging buffer; each GPU that tensors come from has one.
    """

    def __init__(self, places: Sequence[Place], staging_bytes: int) -> None:
        here = _host()
        near = bool(places) and all(each["host"] == here for each in places)
        seen = [set(each["gpus"]) for each in places]
        self._gpus: set[str] = set.intersection(*seen) if near else set()
        self._processes = [each["process"] for each in places]
        self._staging_bytes = staging_bytes
        self._staging: dict[torch.device, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *error: object) -> None:
        """Free the buffers, which the workers no longer use."""
        self._held.clear()
        if self._staging:
            self._staging.clear()
            torch.cuda.ipc_collect()

    @property
    def gpu_factor(self) -> int:
        """Factor by which a batch of GPU tensors may be larger."""
        return GPU_BATCH_FACTOR if self._gpus else 1

    def near(self, tensor: torch.Tensor) -> bool:
        """Return whether the workers can read a tensor from where it is."""
        return bool(self._gpus) and tensor.is_cuda and _uuid(tensor.device.index) in self._gpus

    def wrap(self, batch: Iterable[tuple[str, torch.Tensor]]) -> Payload:
        """Pack a batch. Keep its tensors unchanged until the workers have answered."""
        self._held.clear()
        near: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        rest: list[tuple[str, torch.Tensor]] = []
        for name, tensor in steady(batch):
            if self.near(tensor):
                near.setdefault(tensor.device, []).append((name, tensor.detach()))
            else:
                rest.append((name, tensor))
        if not near:
            return pack(rest)
        sent: dict[str, Any] = {"tensors": {}, "storages": [], "bytes": pack(rest)}
        for device, items in near.items():
            with torch.cuda.device(device):
                for name, tensor in self._stage(device, items, sent):
                    self._send_in_place(name, tensor, sent)
        return sent

    def _stage(
        self, device: torch.device, items: Sequence[tuple[str, torch.Tensor]], sent: dict[str, Any]
    ) -> list[tuple[str, torch.Tensor]]:
        """Copy tensors that fit into the staging buffer, and return the others."""
        large: list[tuple[str, torch.Tensor]] = []
        used = 0
        for name, tensor in items:
            end = used + tensor.nbytes
            if end > self._staging_bytes:
                large.append((name, tensor))
                continue
            if device not in self._staging:
                self._staging[device] = self._make_staging(device)
            copy = self._staging[device][used:end].view(tensor.dtype).view(tensor.shape)
            sent["tensors"][name] = _position(len(sent["storages"]), copy.copy_(tensor))
            used = -(-end // _ALIGNMENT) * _ALIGNMENT
        if used:  # after the copies: a handle has an event that its reader waits for
            sent["storages"].append(self._handles(self._staging[device]))
        return large

    def _make_staging(self, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(self._staging_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise RefitError(
                f"No memory was left on {device} for a staging buffer of "
                f"{self._staging_bytes >> 20} MiB, {GPU_BATCH_FACTOR} times batch_bytes; free some "
                "of the sender's, refit with smaller batch_bytes, or send from the CPU."
            ) from error

    def _send_in_place(self, name: str, tensor: torch.Tensor, sent: dict[str, Any]) -> None:
        try:
            handles = self._handles(tensor)
        except RuntimeError:  # memory of an allocator that has no handles
            tensor = tensor.clone()
            handles = self._handles(tensor)
        self._held.append(tensor)
        sent["tensors"][name] = _position(len(sent["storages"]), tensor)
        sent["storages"].append(handles)

    def _handles(self, tensor: torch.Tensor) -> dict[str, list[Any]]:
        """Make torch's handles of a tensor's memory, one for each reader, as torch counts them."""
        handles = {}
        for process in self._processes:
            device, *rest = tensor.untyped_storage()._share_cuda_()
            handles[process] = [_uuid(device), *rest]
        return handles


def _position(storage: int, tensor: torch.Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [storage, dtype, tensor.storage_offset(), list(tensor.size()), list(tensor.stride())]


@contextmanager
def received(
    payload: Payload, check: Callable[[Sequence[Named]], None] = lambda tensors: None
) -> Iterator[dict[str, torch.Tensor]]:
    """Open what :meth:`Sender.wrap` packed; tensors on a GPU are views of the sender's memory.

    When the block ends, the work on them has been done, so that the sender may reuse that memory.

    Args:
        payload: what came.
        check: called before the first tensor is read, with all of them on the meta device.

    Raises:
        RefitError: not such a payload, or a handle of a GPU that this process does not see.
    """
    if isinstance(payload, bytes):
        check(_described(payload))
        yield _unpacked(payload)
        return
    if not (isinstance(payload, dict) and payload.keys() >= {"tensors", "storages", "bytes"}):
        raise _no_payload(f"a {type(payload).__name__}")
    sent = payload["tensors"].items()
    near = [announced(name, each[3], each[1]) for name, each in sent]
    check([*near, *_described(payload["bytes"])])
    process, gpus = str(os.getpid()), place()["gpus"]
    storages = [_open(handles[process], gpus) for handles in payload["storages"]]
    tensors = _unpacked(payload["bytes"])
    for name, (index, dtype, offset, size, stride) in payload["tensors"].items():
        storage = storages[index]
        empty = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
        tensors[name] = empty.set_(storage, offset, tuple(size), tuple(stride))
    try:
        yield tensors
    finally:
        torch.cuda.current_stream().synchronize()


def _described(payload: bytes) -> list[Named]:
    """Return the tensors of a safetensors buffer without their values, from its header."""
    length = int.from_bytes(payload[:8], "little")
    try:
        header = json.loads(payload[8 : 8 + length])
        header.pop("__metadata__", None)
        return [
            announced(name, each["shape"], DTYPES[each["dtype"]]) for name, each in header.items()
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise _no_payload(f"{type(error).__name__}: {error}") from None


def announced(name: str, shape: Sequence[int], dtype: str) -> Named:
    """Return a tensor without its values, on the meta device; ``dtype`` as ``"bfloat16"``."""
    return name, _without_values(tuple(shape), dtype)


@functools.lru_cache(256)  # a model has thousands of tensors, of a few shapes
def _without_values(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _unpacked(payload: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(payload)
    except (SafetensorError, KeyError, ValueError) as error:
        raise _no_payload(str(error).splitlines()[0]) from None


def _no_payload(what: str) -> RefitError:
    return RefitError(
        f"What came is no batch of tensors ({what}); make it with vllm_fp8rl.refit.transport.pack."
    )


def _host() -> str:
    """Return an equal string for processes of one kernel and IPC namespace, as handles need."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/ipc').readlink()}"
    except OSError:
        return f"unknown {os.getpid()}"  # equal to no other: then bytes travel


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _open(handle: Sequence[Any], gpus: Sequence[str]) -> torch.UntypedStorage:
    owner, *rest = handle
    if owner not in gpus:
        raise RefitError(
            f"A tensor of the refit lies on GPU {owner}, which this worker does not see; send it "
            "from the CPU."
        )
    device, here = gpus.index(owner), torch.cuda.current_device()
    if device != here and torch.cuda.can_device_access_peer(here, device):
        device = here  # read through NVLink or PCIe, without a context of our own on that GPU
    return torch.UntypedStorage._new_shared_cuda(device, *rest)
