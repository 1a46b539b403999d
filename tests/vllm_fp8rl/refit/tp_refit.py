"""Refits of an engine over two ranks of vLLM's executor; run by test_tensor_parallel.py.

python tp_refit.py FOLDER    # with checkpoints "a" and "b"
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError
from fp8rl.kv_scales import scale_name
from fp8rl.numerics import quantize_block
from support.cases import Cases
from support.engine import FUSED, LAYERS, PROMPTS, SCALES, load_tensors, start_engine
from support.gaps import observed_kv_scales
from support.processes import fork_engines
from vllm_fp8rl.calibration import calibrate_kv_scales, lacks_kv_scales, send_kv_scales
from vllm_fp8rl.kv.scales import kv_scale_state
from vllm_fp8rl.refit import refit, refit_from_files
from vllm_fp8rl.refit.receiver import worker as receiver
from vllm_fp8rl.refit.transport import pack

UP = "model.layers.1.mlp.up_proj.weight"
HALF_UPDATED = "^The weights are half-updated"
Codes = dict[str, list[list]]
case = Cases()
"""Each begins with ``a`` but the first, which has no KV scales yet."""


def pointers(worker: Any) -> dict[str, int]:
    model = worker.model_runner.get_model()
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def codes(worker: Any) -> Codes:
    """Plain lists: the answer must not depend on how executors send tensors."""
    return {
        name: [module.weight.view(torch.uint8).tolist(), module.weight_scale_inv.tolist()]
        for name, module in worker.model_runner.get_model().named_modules()
        if hasattr(module, "weight_scale_inv")
    }


def kv_scales(worker: Any) -> dict[str, float]:
    state = kv_scale_state(worker.model_runner.get_model())
    return {scale_name(*key): value for key, value in state.items()}


def expected(tensors: dict[str, torch.Tensor], rank: int) -> Codes:
    """One quantization of the local matrix of each layer, written out without vLLM."""
    wanted = {}
    for layer in range(LAYERS):
        for module, parts in FUSED.items():
            dim = int(module.endswith(("o_proj", "down_proj")))
            whole = [tensors[f"model.layers.{layer}.{part}.weight"] for part in parts]
            made = quantize_block(torch.cat([tensor.chunk(2, dim)[rank] for tensor in whole]))
            wanted[f"model.layers.{layer}.{module}"] = [
                made.codes.view(torch.uint8).tolist(),
                made.scale_inv.tolist(),
            ]
    return wanted


def work_in(worker: Any, root: str) -> None:
    """Each rank in a folder of its own, so that one path leads to different files."""
    os.chdir(Path(root, "ab"[worker.rank]))


def error_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (RefitError, ScaleError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Served:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.a, self.b = (load_tensors(root / name) for name in "ab")
        transfer = {"weight_transfer_config": {"backend": "fp8rl"}}
        self.engine = start_engine(root / "a", Recipe(), tensor_parallel_size=2, **transfer)
        self.llm = self.engine.llm
        self.said: list[list[int]] = []
        """With ``a``."""

    def serve_a(self) -> None:
        refit(self.llm, (self.a | SCALES).items(), expect_kv_scales=True)

    def serves_a(self) -> bool:
        self.llm.reset_prefix_cache()
        return self.engine.greedy(PROMPTS) == self.said


@case
def each_rank_has_its_codes_through_refits_in_place(s: Served) -> None:
    before = s.llm.collective_rpc(pointers)
    assert lacks_kv_scales(s.llm)
    s.serve_a()
    assert not lacks_kv_scales(s.llm)
    s.said = s.engine.greedy(PROMPTS)
    report = refit(s.llm, (s.b | SCALES).items(), expect_kv_scales=True, batch_bytes=1 << 18)
    assert report.tensors == len(s.b) + len(SCALES)
    assert s.llm.collective_rpc(codes) == [expected(s.b, rank) for rank in (0, 1)]
    assert not s.serves_a()
    s.serve_a()
    assert s.serves_a()
    assert s.llm.collective_rpc(pointers) == before


@case
def kv_scales_are_those_of_all_heads(s: Served) -> None:
    calibrated = calibrate_kv_scales(s.llm, PROMPTS)
    assert s.llm.collective_rpc(kv_scales) == [calibrated] * 2
    for name, value in observed_kv_scales(s.root / "a", Recipe(), PROMPTS).items():
        # Each rank sees half of the heads; transformers keeps K and V of layer 0 as they are.
        tolerance = 1e-3 if ".layers.0." in name else 0.05
        assert calibrated[name] == pytest.approx(value, rel=tolerance), name
    send_kv_scales(s.llm, {name: scale.item() for name, scale in SCALES.items()})
    assert s.serves_a()
    # The other transport: the same steps as functions, for engines without our extension.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver, "has_refit_methods", lambda extension: False)
        s.serve_a()
        assert calibrate_kv_scales(s.llm, PROMPTS) == calibrated


@case
def a_fault_on_any_rank_closes_the_engine_until_a_complete_refit(s: Served) -> None:
    broken = s.a | {UP: torch.full_like(s.a[UP], torch.nan)}
    with pytest.raises(RefitError, match=f"^'{UP}' has NaN"):
        refit(s.llm, broken.items(), expect_kv_scales=False, batch_bytes=1)
    with pytest.raises(RefitError, match=HALF_UPDATED):
        s.engine.greedy(PROMPTS)
    refit_from_files(s.llm, str(s.root / "a"), expect_kv_scales=False)
    assert s.serves_a()


@case
def codes_whose_blocks_the_ranks_share_are_refused(s: Served) -> None:
    gate = "model.layers.0.mlp.gate_proj.weight"
    sent = list(zip([gate, f"{gate}_scale_inv"], quantize_block(s.b[gate]), strict=True))
    with pytest.raises(RefitError, match=f"^'{gate}"):
        refit(s.llm, sent, expect_kv_scales=False)
    assert s.serves_a()


@case
def files_must_be_the_same_on_every_rank(s: Served) -> None:
    s.llm.collective_rpc(work_in, args=(str(s.root),))
    (s.root / "b" / "here").write_bytes((s.root / "b" / "model.safetensors").read_bytes())
    for file, error in (
        ("model.safetensors", "'model.safetensors' is not the same for rank 1 as for rank 0"),
        ("here", r"'here' cannot be read \(No such file or directory\)"),
    ):
        with pytest.raises(RefitError, match=error):
            refit_from_files(s.llm, file, expect_kv_scales=False)
    assert s.serves_a()


@case
def an_update_that_one_rank_refuses_ends_on_all(s: Served) -> None:
    """vLLM took it for active still on the others, where the next could not start."""
    name = "model.norm.weight"
    parts = [{"payload": pack([(name, s.a[name] * factor)])} for factor in (1, torch.nan)]
    s.llm.init_weight_transfer_engine({"init_info": {}})
    s.llm.start_weight_update()
    with pytest.raises(Exception, match=f"'{name}' has NaN|must be a mapping"):  # before 0.29
        s.llm.update_weights({"update_info": parts})
    s.llm.start_weight_update()
    s.llm.update_weights({"update_info": {"payload": pack(s.a.items())}})
    s.llm.finish_weight_update()
    assert s.serves_a()


@case
def a_killed_rank_is_an_error_not_a_wait(s: Served) -> None:
    def killing():
        for number, item in enumerate(s.b.items()):
            if number == 5:
                os.kill(s.llm.llm_engine.model_executor.workers[1].proc.pid, signal.SIGKILL)
            yield item

    with pytest.raises(RefitError, match=r"failed on a worker.*died, restart the engine\.$"):
        refit(s.llm, killing(), expect_kv_scales=False, batch_bytes=1)
    with pytest.raises(RefitError, match=HALF_UPDATED):
        s.engine.greedy(PROMPTS)


if __name__ == "__main__":
    fork_engines()
    served = Served(Path(sys.argv[1]))
    print(json.dumps(asyncio.run(case.run_all(served, served.serve_a))), flush=True)  # noqa: T201
    # A shutdown may wait for ever for the sockets of the worker that was killed (vLLM 0.30.0).
    os._exit(0)
