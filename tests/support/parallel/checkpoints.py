"""Megatron's distributed checkpoints of the distributed optimizer, with and without the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_fp8rl.export import unwrap_chunks
from support.parallel.run import Run, Topology

# Each parameter's state in the parameter's own shape, whatever the number of data-parallel ranks.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def both_ways(
    topology: Topology, weights: dict[str, torch.Tensor], device: torch.device, out: Path
) -> dict[str, dict[str, Any]]:
    """Saved with the plugin and loaded without, and the other way round; data parallel only."""
    found = {}
    for fp8 in (True, False):
        name = "from fp8" if fp8 else "from bf16"
        folder = out / name
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()
        found[name] = _hand_over(topology, weights, device, folder, fp8)
    return found


def _hand_over(
    topology: Topology,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    folder: Path,
    fp8: bool,
) -> dict[str, Any]:
    source = Run(topology, weights, device, fp8=fp8)
    _step(source, 0)
    dist_checkpointing.save(_sharded(source, loading=False), str(folder))

    other = {name: tensor.flip(0) for name, tensor in weights.items()}
    target = Run(topology, other, device, fp8=not fp8)
    _step(target, 7)  # codes and moments of another run, which must not survive
    before = _differences(source, target)
    with _steps_of_torchs_adam():
        state = dist_checkpointing.load(_sharded(target, loading=True), str(folder))
        unwrap_chunks(target.model)[0].load_state_dict(state["model"])
        target.optimizer.load_state_dict(state["optimizer"])
    result = {
        "keys": sorted(dist_checkpointing.load_tensors_metadata(str(folder))),
        "different before": before,
        "different": _differences(source, target),
    }
    # The saved run itself, changed over to the other precision, is the truth.
    if source.conversion is not None:
        source.conversion.close()
    else:
        source.convert()
    result["expected"], result["found"] = (
        [_step(run, step) for step in (1, 2)] for run in (source, target)
    )
    return result


def _step(run: Run, step: int) -> tuple[float | None, float]:
    """Loss and gradient norm."""
    return run.forward_backward(step), run.update()


def _sharded(run: Run, *, loading: bool) -> dict[str, Any]:
    model = unwrap_chunks(run.model)[0].sharded_state_dict()
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA)
    return {"model": model, "optimizer": optimizer}


def _differences(a: Run, b: Run) -> list[str]:
    """Of weights, and of this rank's share of float32 masters and Adam's state, to the bit."""
    pairs = zip(_state(a), _state(b), strict=True)
    return [name for (name, x), (_, y) in pairs if not torch.equal(x, y)]


def _state(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    yield from unwrap_chunks(run.model)[0].named_parameters()
    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        adam = optimizer.optimizer
        masters = [p for group in adam.param_groups for p in group["params"]]
        for index, master in enumerate(masters):
            yield f"master {index}", master
            for key, value in adam.state[master].items():
                yield f"{key} {index}", value
        if "step" not in adam.state[masters[0]]:  # TransformerEngine's Adam
            yield "step", torch.tensor([group.get("step", 0) for group in adam.param_groups])


@contextmanager
def _steps_of_torchs_adam() -> Iterator[None]:
    """megatron-core 0.16.1 cannot load its distributed optimizer over torch's Adam, which is all
    there is without TransformerEngine: it saves one ``step`` for all parameters, looks for one of
    each, and lets all of them count in one tensor."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
