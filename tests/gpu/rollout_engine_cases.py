"""The guard's fallback with sleep mode and captured graphs; run by test_rollout_engine.py.

In a process of its own: vLLM's allocator serves one engine a process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import vllm_fp8rl
from fp8rl import Recipe
from nemo_rl_ext.workers.rollout_engine import UPSTREAM_EXTENSION, RestartableEngine
from support.gpu_engine import QUICK, GpuEngine, make_checkpoints, start_engine
from support.nemo_rl import Closing

RECIPE = Recipe.from_dict({"kv_cache": {"dtype": "auto"}})


class Upstream:
    """What the mixin needs of NeMo RL's synchronous vLLM worker."""

    cfg: Any = {"vllm_cfg": {"async_engine": False}}
    llm: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.free: list[int] = []

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        torch.cuda.synchronize()
        self.free.append(torch.cuda.mem_get_info()[0])
        self.llm = start_engine(self.path, RECIPE, **llm_kwargs).llm


class Worker(RestartableEngine, Upstream):
    worker_extension = f"{Closing.__module__}.{Closing.__name__}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoints(Path(folder))["a"]
        worker = Worker(path)
        arguments = {
            **vllm_fp8rl.engine_args(RECIPE),
            "worker_extension_cls": UPSTREAM_EXTENSION,
            "enable_sleep_mode": True,
            **QUICK,
        }
        worker._create_engine(arguments)
        quantized = GpuEngine(worker.llm, RECIPE).greedy()
        worker.llm.sleep(level=1)
        seconds = worker.restart_in_bf16()
        worker.llm.sleep(level=1)
        worker.llm.wake_up()
        unquantized = GpuEngine(worker.llm, RECIPE).greedy()
        kept = (worker.free[0] - worker.free[1]) / 2**20
        stock = start_engine(path, RECIPE, quantization=None, **QUICK)
        assert unquantized == stock.greedy()
        assert unquantized != quantized, "the checkpoint cannot tell FP8 from BF16"
        assert kept < 2048, "weights or KV cache of the first engine are still on the GPU"
    sys.stdout.write(f"passed: {seconds:.1f} s; the first engine keeps {kept:.0f} MiB\n")


if __name__ == "__main__":
    main()
