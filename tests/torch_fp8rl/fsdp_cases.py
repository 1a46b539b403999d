"""What test_fsdp.py compares: a few steps under FSDP2, and in one process without it.

Run as a script in processes of one world: OUT and the cases as JSON. Each rank trains on micro-
batches of its own; rank 0 also trains on those of all ranks, and writes both to ``OUT``.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8rl.errors import Fp8RLError
from support.hf import ALIGNED, RAGGED, convert_alone, hf_model, loss_of
from support.launch import join
from torch_fp8rl.kv import KVCacheInTraining, QKVObserver

STEPS, MICRO_BATCHES, RATE = 2, 2, 0.5
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    kind: str = "qwen3"
    ragged: bool = False
    reshard: bool = True
    keep: bool = False
    first: str = "convert"
    """``shard``: ``convert`` comes after ``fully_shard``."""
    checkpoint: bool = False
    offload: bool = False
    kv: bool = False
    """K and V are rounded from the second step on, by the scales of the first."""

    def masters(self) -> Any:
        """The model with parameters in float32."""
        model = hf_model(self.kind, RAGGED if self.ragged else ALIGNED, torch.float32)
        if self.checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def shard(self, model: Any) -> None:
        more: dict[str, Any] = {"mp_policy": BF16, "reshard_after_forward": self.reshard}
        if self.offload:
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for layer in model.model.layers:
            fully_shard(layer, **more)
        fully_shard(model, **more)


class Cache:
    """The rollout's cache in the trainer of a case; ``group`` has the ranks that observe."""

    def __init__(self, case: Case, model: Any, group: Any = None) -> None:
        self.scales: dict[str, torch.Tensor] = {}
        self._group = group
        self._parts = (QKVObserver(model), KVCacheInTraining(model)) if case.kv else None

    def end_step(self) -> None:
        if self._parts is not None:
            observer, cache = self._parts
            self.scales = observer.scales(1.0, self._group)
            cache.set({name: scale / 4 for name, scale in self.scales.items()})  # clips


def seed(step: int, rank: int, number: int, ranks: int) -> int:
    return (step * ranks + rank) * MICRO_BATCHES + number


def sharded(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    model = case.masters()
    names = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if case.first == "shard":
        case.shard(model)
    conversion = convert_alone(model)
    if case.first == "convert":
        case.shard(model)
    cache = Cache(case, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    with conversion.keeping_codes() if case.keep else nullcontext():
        for step in range(STEPS):
            for number in range(MICRO_BATCHES):
                model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
                loss = loss_of(model, seed(step, rank, number, ranks))
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            cache.end_step()
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == names
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    codes = {name: pair.codes.view(torch.uint8) for name, pair in conversion.weight_codes().items()}
    return {"losses": losses, "state": whole, "codes": codes, "scales": cache.scales}


def in_one_process(case: Case, ranks: int, group: Any) -> dict[str, Any]:
    """All micro-batches over a BF16 copy; sums in float32 in the order of FSDP2."""
    masters, model = case.masters(), case.masters()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    conversion = convert_alone(model)
    cache = Cache(case, model, group)
    losses = []
    pairs = list(zip(masters.parameters(), model.parameters(), strict=True))
    for step in range(STEPS):
        totals = [torch.zeros_like(master) for master, _ in pairs]
        for rank in range(ranks):
            sums = [torch.zeros_like(master) for master, _ in pairs]
            for number in range(MICRO_BATCHES):
                loss = loss_of(model, seed(step, rank, number, ranks))
                loss.backward()
                losses.append(loss.detach())
                for total, (_, copied) in zip(sums, pairs, strict=True):
                    total += copied.grad.float()
                model.zero_grad()
            for total, one in zip(totals, sums, strict=True):
                total += one
        with torch.no_grad():
            for total, (master, copied) in zip(totals, pairs, strict=True):
                master.add_(total / ranks, alpha=-RATE)
                copied.copy_(master)
        cache.end_step()
    codes = {name: pair.codes.view(torch.uint8) for name, pair in conversion.weight_codes().items()}
    state = masters.state_dict()
    return {"losses": losses, "state": state, "codes": codes, "scales": cache.scales}


def under_ddp(rank: int, ranks: int) -> list[str]:
    """Parameters whose gradient is not the mean of what the ranks have by themselves."""
    model = hf_model()
    convert_alone(model)
    by_itself = copy.deepcopy(model)
    wrapper = DistributedDataParallel(model)  # reduces while it lives
    loss_of(wrapper, rank).backward()
    means = [torch.zeros_like(parameter) for parameter in by_itself.parameters()]
    for each in range(ranks):
        by_itself.zero_grad()
        loss_of(by_itself, each).backward()
        for mean, parameter in zip(means, by_itself.parameters(), strict=True):
            mean += parameter.grad / ranks
    pairs = zip(model.named_parameters(), means, strict=True)
    return [name for (name, parameter), mean in pairs if not torch.equal(parameter.grad, mean)]


def alone(first: str) -> str:
    """What a linear says that is given to ``fully_shard`` by itself."""
    model = Case().masters()
    if first == "convert":
        convert_alone(model)
    for layer in model.model.layers:
        fully_shard(layer.self_attn.k_proj)
    try:
        if first == "shard":
            convert_alone(model)
        loss_of(model)
    except Fp8RLError as error:
        return str(error)
    return ""


def main(out: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    rank, ranks = join()
    first_alone = torch.distributed.new_group([0])
    found: dict[str, Any] = {first: alone(first) for first in ("convert", "shard")}
    found["ddp"] = under_ddp(rank, ranks)
    for name, fields in cases.items():
        case = Case(**fields)
        found[name] = {"sharded": sharded(case, rank, ranks)}
        if rank == 0:
            found[name]["one"] = in_one_process(case, ranks, first_alone)
    torch.save(found, out / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
