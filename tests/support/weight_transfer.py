"""Trainers that know vLLM's weight-transfer API alone: vLLM's own classes, an ``LLM`` as server."""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

Items = Sequence[tuple[str, torch.Tensor]]


class LocalClient(HTTPVLLMWeightSyncClient):
    """vLLM's client of a server, which gives an ``LLM`` what it would post, as JSON."""

    def __init__(self, llm: Any) -> None:
        super().__init__("http://localhost")
        self.llm = llm

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        given = json.loads(json.dumps(body or {}))
        if path == "finish_weight_update":
            self.llm.finish_weight_update(**given)
        else:
            getattr(self.llm, path)(*[given][: len(given)])


def trainer(llm: Any, transport: str, items: Items, **options: Any) -> Any:
    """vLLM's trainer engine for a transport, ``nccl`` or ``ipc``, which sends these tensors.

    Args:
        llm: engine with backend ``fp8rl_<transport>``, one worker.
        transport: name of the trainer's side in vLLM's factory.
        items: read again for each ``send_weights``.
        options: of the transport's init info.
    """
    kinds = {"nccl": nccl_engine.NCCLTrainerInitInfo, "ipc": ipc_engine.IPCTrainerInitInfo}
    model: Any = SimpleNamespace(named_parameters=lambda: iter(items))
    return WeightTransferTrainerFactory.trainer_init(
        kinds[transport](rank=0, **options), client=LocalClient(llm), source=ModuleSource(model)
    )


class _Wire:
    """A broadcast from one thread to another, which waits as NCCL does until the other has come."""

    def __init__(self) -> None:
        self.buffers: queue.Queue[torch.Tensor] = queue.Queue(1)

    def send(self, tensor: torch.Tensor, src: int, stream: None) -> None:
        self.buffers.put(tensor.clone(), timeout=30)

    def receive(self, tensor: torch.Tensor, src: int, stream: None) -> None:
        tensor.copy_(self.buffers.get(timeout=30))


def stand_in_for_gpus(patch: pytest.MonkeyPatch) -> None:
    """Put CPU stand-ins in the place of NCCL, not ``packed``, and of CUDA IPC handles."""
    wire = _Wire()
    sender, receiver = (
        SimpleNamespace(broadcast=end, destroy=lambda: None) for end in (wire.send, wire.receive)
    )
    patch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: sender)
    patch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: receiver)
    patch.setattr(torch.cuda, "current_stream", lambda: None)

    shared: list[torch.Tensor] = []

    def share(tensor: torch.Tensor) -> tuple[None, tuple[int | None, ...]]:
        shared.append(tensor)
        return None, (len(shared) - 1, *[None] * 6)

    gpu = SimpleNamespace(uuid="GPU-0")
    patch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.cuda, "ipc_collect", lambda: None)
    patch.setattr(ipc_engine, "reduce_tensor", share)
    patch.setattr(ipc_engine, "rebuild_cuda_tensor", lambda number, *rest: shared[number])
    allowed = SimpleNamespace(VLLM_ALLOW_INSECURE_SERIALIZATION=True)  # handles come pickled
    patch.setattr(ipc_engine, "envs", allowed)
