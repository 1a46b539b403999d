"""One engine whose core is killed in the middle of a refit; prints what its caller sees as JSON.

python kill_cases.py FOLDER    # with a checkpoint "a", and in "delay" the seconds to the kill
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import torch

from fp8rl import Recipe
from support.engine import SCALES, load_tensors, start_engine
from vllm_fp8rl.refit import refit


def main(root: Path) -> dict[str, str]:
    engine = start_engine(root / "a", Recipe())
    weights = load_tensors(root / "a") | SCALES
    refit(engine.llm, weights.items(), expect_kv_scales=True)
    core = engine.llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
    delay = float((root / "delay").read_text())

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        threading.Timer(delay, os.kill, (core, signal.SIGKILL)).start()
        for item in weights.items():
            time.sleep(0.3 / len(weights))
            yield item

    refitting = raised(lambda: refit(engine.llm, slowly(), expect_kv_scales=True, batch_bytes=1))
    time.sleep(1.0)
    return {"error": refitting, "afterwards": raised(lambda: engine.greedy([[5, 6, 7]], 1))}


def raised(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)  # an engine whose core is dead waits for it
