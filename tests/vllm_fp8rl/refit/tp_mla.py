"""Run by test_moe_parallel.py in a process of its own: multi-latent attention over two ranks.

Heads are split, what leads to latents is whole on both ranks, experts are on one of them each.
Argument: folder with checkpoints ``a`` and ``b``. Prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

from support.engine import PROMPTS, load_tensors, start_engine
from support.mla import ALL, ON_A_CPU


def main(root: Path) -> list[list[list[int]]]:
    from vllm_fp8rl.refit import refit, worker

    engine = start_engine(
        root / "a",
        ALL,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        worker_extension_cls=worker.EXTENSION,
        **ON_A_CPU,
    )
    tokens = [engine.greedy(PROMPTS)]
    for name in "ba":
        refit(engine.llm, load_tensors(root / name).items(), expect_kv_scales=False)
        tokens.append(engine.greedy(PROMPTS))
    engine.llm.llm_engine.engine_core.shutdown()
    return tokens


if __name__ == "__main__":
    print(json.dumps({"tokens": main(Path(sys.argv[1]))}))  # noqa: T201
