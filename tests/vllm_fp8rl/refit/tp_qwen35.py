"""Run by test_moe_parallel.py in a process of its own: Qwen3.5 over two ranks, in float32.

Heads of gated delta nets and of attention are split, experts are on one rank each. Argument: folder
with checkpoints ``a`` and ``b``. Prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import pytest

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.engine import load_tensors, register_model, start_engine
from support.gated_delta_net import compute_in_float32
from support.teacher_forced import vllm_logprobs
from support.towers import TEXT_ONLY

# Here, because each rank imports this file too.
register_model(Path(sys.argv[1]) / "a")
compute_in_float32(pytest.MonkeyPatch())


def main(root: Path) -> list[list[float]]:
    from vllm_fp8rl.refit import refit, worker

    engine = start_engine(
        root / "a",
        Recipe(kv_cache=KVCache(dtype="auto")),
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        worker_extension_cls=worker.EXTENSION,
        **TEXT_ONLY,
    )
    logprobs = [vllm_logprobs(engine).tolist()]
    for name in "ba":
        report = refit(engine.llm, load_tensors(root / name).items(), expect_kv_scales=False)
        assert report.left_out > 0  # the tower
        logprobs.append(vllm_logprobs(engine).tolist())
    engine.llm.llm_engine.engine_core.shutdown()
    return logprobs


if __name__ == "__main__":
    print(json.dumps({"logprobs": main(Path(sys.argv[1]))}))  # noqa: T201
