"""Run by test_tensor_parallel.py with a folder of checkpoints: TP=2 over vLLM's executor."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError
from fp8rl.kv_scales import scale_name, scale_names
from fp8rl.numerics import quantize_block
from support.engine import KV_SCALE, LAYERS, PROMPTS, load_tensors, start_engine
from support.processes import fork_engines


def pointers(worker) -> dict[str, int]:
    model = worker.model_runner.get_model()
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def codes(worker) -> dict[str, tuple[list, list]]:
    """Plain lists: the answer must not depend on how executors send tensors."""
    model = worker.model_runner.get_model()
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale_inv"):
            weight, scale = module.weight, module.weight_scale_inv
            found[name] = (weight.view(torch.uint8).tolist(), scale.tolist())
    return found


def kv_scales(worker) -> dict[str, float]:
    from vllm_fp8rl.kv.scales import kv_scale_state

    state = kv_scale_state(worker.model_runner.get_model())
    return {scale_name(*key): value for key, value in state.items()}


def expected(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, tuple[list, list]]:
    """One quantization of the local matrix of each layer, written out without vLLM."""

    def half(name: str, dim: int) -> torch.Tensor:
        return tensors[f"{name}.weight"].chunk(2, dim)[rank]

    wanted = {}
    for layer in range(LAYERS):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        local = {
            f"{at}.qkv_proj": torch.cat([half(f"{at}.{p}_proj", 0) for p in "qkv"]),
            f"{at}.o_proj": half(f"{at}.o_proj", 1),
            f"{mlp}.gate_up_proj": torch.cat([half(f"{mlp}.{p}_proj", 0) for p in ("gate", "up")]),
            f"{mlp}.down_proj": half(f"{mlp}.down_proj", 1),
        }
        for name, matrix in local.items():
            quantized = quantize_block(matrix)
            wanted[name] = (
                quantized.codes.view(torch.uint8).tolist(),
                quantized.scale_inv.tolist(),
            )
    return wanted


def work_in(worker, root: str) -> None:
    """Each rank in a folder of its own, so that one path leads to different files."""
    os.chdir(Path(root, "ab"[worker.rank]))


def error_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (RefitError, ScaleError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(root: Path) -> dict[str, object]:
    from vllm_fp8rl.calibration import (
        calibrate_kv_scales,
        lacks_kv_scales,
        send_kv_scales,
    )
    from vllm_fp8rl.refit import refit, refit_from_files
    from vllm_fp8rl.refit.receiver import worker
    from vllm_fp8rl.refit.transport import pack

    scales = {name: torch.tensor([KV_SCALE]) for name in scale_names(LAYERS, ("k", "v"))}
    a, b = (load_tensors(root / name) for name in "ab")
    transfer = {"weight_transfer_config": {"backend": "fp8rl"}}
    engine = start_engine(root / "a", Recipe(), tensor_parallel_size=2, **transfer)
    llm = engine.llm
    before = llm.collective_rpc(pointers)
    found: dict[str, Any] = {}
    lacking = lacks_kv_scales(llm)
    refit(llm, (a | scales).items(), expect_kv_scales=True)
    first = engine.greedy(PROMPTS)
    found["lacks scales"] = [lacking, lacks_kv_scales(llm)]
    found["calibrated"] = calibrate_kv_scales(llm, PROMPTS)
    found["held"] = llm.collective_rpc(kv_scales)
    send_kv_scales(llm, {name: scale.item() for name, scale in scales.items()})
    found["scaled_back"] = engine.greedy(PROMPTS) == first
    report = refit(llm, (b | scales).items(), expect_kv_scales=True, batch_bytes=1 << 18)
    found["tensors"] = report.tensors
    found["codes"] = llm.collective_rpc(codes) == [expected(b, rank) for rank in (0, 1)]
    found["tokens"] = second = engine.greedy(PROMPTS)
    # The other transport: the same steps as functions, for engines without our extension.
    worker.has_refit_methods = lambda extension: False
    refit(llm, (a | scales).items(), expect_kv_scales=True)
    found["calibrated_by_functions"] = calibrate_kv_scales(llm, PROMPTS)
    send_kv_scales(llm, {name: scale.item() for name, scale in scales.items()})
    found["there_and_back"] = engine.greedy(PROMPTS) == first != second

    name = "model.layers.1.mlp.up_proj.weight"
    broken = dict(a)
    broken[name] = torch.full_like(a[name], torch.nan)
    zero = [(next(iter(scales)), torch.zeros(1))]
    found["errors"] = [
        error_of(lambda: refit(llm, broken.items(), expect_kv_scales=False, batch_bytes=1)),
        error_of(lambda: engine.greedy(PROMPTS)),
        error_of(lambda: refit(llm, zero, expect_kv_scales=True)),
    ]
    refit_from_files(llm, str(root / "a"), expect_kv_scales=False)
    found["recovered"] = engine.greedy(PROMPTS) == first
    found["pointers"] = llm.collective_rpc(pointers) == before

    name = "model.layers.0.mlp.gate_proj.weight"
    codes_and_scales = zip([name, f"{name}_scale_inv"], quantize_block(b[name]), strict=True)
    found["codes of gate"] = error_of(
        lambda: refit(llm, codes_and_scales, expect_kv_scales=False, batch_bytes=1 << 30)
    )
    llm.collective_rpc(work_in, args=(str(root),))
    (root / "b" / "here").write_bytes((root / "b" / "model.safetensors").read_bytes())
    found["different files"] = [
        error_of(lambda: refit_from_files(llm, "model.safetensors", expect_kv_scales=False)),
        error_of(lambda: refit_from_files(llm, "here", expect_kv_scales=False)),
        engine.greedy(PROMPTS) == first,
    ]

    # Each rank has its own part of an update; the second one's is wrong.
    name = "model.norm.weight"
    parts = [{"payload": pack([(name, a[name] * factor)])} for factor in (1, torch.nan)]
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": parts})
    except Exception as error:
        found["one rank's update"] = [str(error)]
    llm.start_weight_update()
    llm.update_weights({"update_info": {"payload": pack(a.items())}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    found["one rank's update"].append(engine.greedy(PROMPTS) == first)

    def killing():
        for number, item in enumerate(b.items()):
            if number == 5:
                os.kill(llm.llm_engine.model_executor.workers[1].proc.pid, signal.SIGKILL)
            yield item

    found["killed"] = [
        error_of(lambda: refit(llm, killing(), expect_kv_scales=False, batch_bytes=1)),
        error_of(lambda: engine.greedy(PROMPTS)),
    ]
    return found


if __name__ == "__main__":
    fork_engines()
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)  # noqa: T201
    # A shutdown may wait for ever for the sockets of the worker that was killed (vLLM 0.30.0).
    os._exit(0)
