"""What a process has imported from which scripts are forked: see ``support/processes.py``."""

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
MODULES = (
    "support.engine",  # sets what vLLM reads at import
    "vllm.entrypoints.llm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
)

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank
sys.path[:0] = map(str, (TESTS, TESTS.parent, TESTS.parent / "plugins"))
for name in MODULES:
    with contextlib.suppress(ImportError):  # an environment may have one engine alone
        importlib.import_module(name)
gc.freeze()  # no fork looks through it
