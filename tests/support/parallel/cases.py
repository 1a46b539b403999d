"""What promises.py compares: one small FP8 training run on any topology.

:data:`WORKER` goes through topologies in one world of processes (see ``launch``), and each rank
writes what it saw of one to ``OUT/<topology>.<rank>.pt``. On a CPU test_parallel.py runs
:func:`train` in its own process for the truth; on GPUs a world of one process does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from fp8rl.errors import CheckpointError, ScaleError
from fp8rl.kv_scales import scale_names
from fp8rl.numerics import quantize_block
from megatron_fp8rl.export import export_hf, load_hf
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.layers.swiglu import Fp8SwigluMLP
from megatron_fp8rl.testing.cpu_shim import CpuShim
from megatron_fp8rl.testing.local_spec import completed_local_spec
from support.launch import join
from support.megatron import weight_codes_hf
from support.parallel.run import (
    CPU,
    LAST_STAGES,
    LAYERS,
    SINGLES,
    STEPS,
    TOPOLOGIES,
    VOCAB,
    Run,
    Topology,
)

WORKER = Path(__file__).with_name("worker.py")


def train(
    topology: Topology, weights: dict[str, torch.Tensor], device: torch.device = CPU
) -> dict[str, Any]:
    """A few FP8 optimizer steps; what this rank saw of them, on the CPU."""
    run = Run(topology, weights, device)
    assert run.conversion is not None
    result: dict[str, Any] = {"int8": _loss_over_int8(run) if topology.has_int8 else None}
    observer = QKVObserver(run.model)
    cache = KVCacheInTraining(run.model)
    lacking = {name: t for name, t in weights.items() if name != LAST_STAGES}
    try:
        load_hf(run.model, lacking, vocab_size=VOCAB, allow_cast=True)
    except CheckpointError as error:  # what is exported below is as it was
        result["refused load"] = str(error)
    result |= {
        "exported": _exported(run),
        "modules": sorted(run.conversion.modules),
        "fused": sum(isinstance(m, Fp8SwigluMLP) for chunk in run.model for m in chunk.modules()),
        "losses": [],
    }
    for step in range(STEPS):
        loss = run.forward_backward(step)
        if step == 0:
            result["amax"] = _by_name(observer)  # as scales they would be rounded
            scales = observer.scales(margin=1.0)
            cache.set({name: scale / 4 for name, scale in scales.items()})  # clips
        if loss is not None:
            result["losses"].append(loss)
        run.update()
        if topology.overlap:  # a look at weights of which each rank has its own share alone
            for module in run.conversion.modules.values():
                weight_codes_hf(module)
        result["trained"] = _exported(run)  # a refit after every step
    result["clipped"] = cache.metrics()
    result["codes"] = {"fp32": _code_mismatches(run.conversion, result["trained"], "fp32")}
    run.conversion.close()
    again = run.convert(weights={"scale_format": "pow2"})
    result["codes"]["pow2"] = _code_mismatches(again, result["trained"], "pow2")
    result["nan"] = _nan_on_the_last_rank(observer)
    return result


def _loss_over_int8(run: Run) -> float | None:
    """The first loss, over K and V as an INT8 cache holds them."""
    cache = KVCacheInTraining(run.model, "int8_per_token_head")
    try:
        return run.forward_backward(0)
    finally:
        cache.close()


def _by_name(observer: QKVObserver) -> dict[str, torch.Tensor]:
    return dict(zip(scale_names(LAYERS), observer.amax().cpu().flatten(), strict=True))


def _exported(run: Run) -> dict[str, torch.Tensor]:
    return {name: t.cpu() for name, t in export_hf(run.model, vocab_size=VOCAB)}


def _code_mismatches(conversion, exported, scale_format) -> dict[str, tuple[int, int]]:
    """Per HF module: codes and scales that differ from quantizing the whole exported matrix."""
    dense = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_tensor_parallel_group()
    counts = {}
    for module in conversion.modules.values():
        for name, held in weight_codes_hf(module).items():
            group = experts if ".experts." in name else dense
            size, rank = group.size(), group.rank()
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            weight = exported[f"{name}.weight"].to(held.codes.device)
            whole = quantize_block(weight, scale_format=scale_format)
            codes = whole.codes.view(torch.uint8).chunk(size, dim)[rank]
            scales = whole.scale_inv.chunk(size, dim)[rank]
            assert codes.shape == held.codes.shape and scales.shape == held.scale_inv.shape
            wrong = (codes != held.codes.view(torch.uint8)).sum() + (scales != held.scale_inv).sum()
            counts[name] = (codes.numel() + scales.numel(), int(wrong))
    return counts


def _nan_on_the_last_rank(observer: QKVObserver) -> str:
    """What this rank is told when one rank alone saw a NaN."""
    world = torch.distributed.get_world_size()
    table = torch.ones(LAYERS, 3)
    if torch.distributed.get_rank() == world - 1:
        table[2, 1] = torch.nan
    observer.load_state_dict({"amax": table})
    try:
        observer.scales(margin=1.0)
    except ScaleError as error:
        return str(error)
    return "no error"


def not_compiled() -> AbstractContextManager[Any]:
    """Pinned layers' activation, which megatron compiles, takes minutes to be compiled."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _world(device_type: str) -> Iterator[torch.device]:
    """This process in the world of ``launch``, and its device."""
    on_cpu = device_type == "cpu"
    with CpuShim().active() if on_cpu else completed_local_spec(), not_compiled():
        join(device_type)
        yield CPU if on_cpu else torch.device("cuda", torch.cuda.current_device())
        torch.distributed.destroy_process_group()


def main(out: Path, backends: dict[str, str | None], device_type: str) -> None:
    """Go through topologies, each with its GEMM backend."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    weights = {kind: load_file(out / f"{kind}.safetensors") for kind in ("dense", "moe")}
    with _world(device_type) as device:
        rank = torch.distributed.get_rank()
        for name, backend in backends.items():
            sys.stderr.write(f"{name}\n")  # a hang is told with the last line
            sys.stderr.flush()
            topology = replace({**SINGLES, **TOPOLOGIES}[name], gemm_backend=backend)
            parallel_state.initialize_model_parallel(
                topology.tp,
                topology.pp,
                virtual_pipeline_model_parallel_size=topology.vpp,
                expert_model_parallel_size=topology.ep,
                expert_tensor_parallel_size=topology.expert_tp,
            )
            result = train(topology, weights[topology.kind], device)
            parallel_state.destroy_model_parallel()
            result["backend"] = backend or "by default"
            part = out / f"{name}.{rank}.part"
            torch.save(result, part)
            part.replace(out / f"{name}.{rank}.pt")  # what is there is complete
