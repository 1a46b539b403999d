"""Run by test_rollout_engine.py in a process of its own: a real AsyncLLM is made again in BF16.

Arguments: folder with checkpoint ``a``. Prints one JSON object on its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import vllm_fp8rl
from fp8rl import Recipe
from nemo_rl_ext.workers.rollout_engine import UPSTREAM_EXTENSION, RestartableEngine
from support.engine import SETTINGS, register_model  # its module sets what vLLM reads at import
from support.processes import fork_engines

LONG, SHORT = [7, 8, 9], [5, 6, 7, 8]
LENGTH = 60


class Extension:
    """Stands for NeMo RL's extension of vLLM's worker."""


class Upstream:
    """What the mixin needs of NeMo RL's asynchronous vLLM worker."""

    def __init__(self) -> None:
        self.cfg = {"vllm_cfg": {"async_engine": True}}
        self.llm: Any = None
        self.requests = 0

    async def generate(self, prompt: list[int], tokens: int) -> list[int]:
        from vllm import SamplingParams

        self.requests += 1
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        last: list[int] = []
        async for output in self.llm.generate(
            {"prompt_token_ids": prompt}, parameters, str(self.requests)
        ):
            last = list(output.outputs[0].token_ids)
        return last

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**llm_kwargs))


class Worker(RestartableEngine, Upstream):
    worker_extension = f"{Path(__file__).stem}.{Extension.__name__}"


async def main(root: Path) -> dict[str, Any]:
    register_model(root / "a")
    worker = Worker()
    arguments = {
        "model": str(root / "a"),
        **SETTINGS,
        **vllm_fp8rl.engine_args(Recipe.from_dict({"kv_cache": {"dtype": "auto"}})),
        "worker_extension_cls": UPSTREAM_EXTENSION,
    }
    worker._create_engine(arguments)
    gate = worker.llm
    found: dict[str, Any] = {"short": await worker.generate(SHORT, 12)}
    long = asyncio.ensure_future(worker.generate(LONG, LENGTH))
    while not gate.running:
        await asyncio.sleep(0.001)
    found["held"] = [worker.hold_if_idle()]
    try:
        worker.restart_in_bf16()
    except RuntimeError as error:
        found["error"] = str(error)
    found["long"] = await long
    found["held"].append(worker.hold_if_idle())
    waiting = asyncio.ensure_future(worker.generate(SHORT, 12))
    await asyncio.sleep(0.05)
    found["seconds"] = worker.restart_in_bf16()
    await asyncio.sleep(0.05)
    found["waits"] = [gate.running, waiting.done()]  # until a refit has succeeded
    await worker.llm.collective_rpc("check_health")
    worker.release()
    found["waited"] = await waiting
    found["same"] = worker.llm is gate
    found["after"] = await worker.generate(LONG, LENGTH)
    found["dtype"] = str(worker.llm.vllm_config.cache_config.cache_dtype)
    worker.llm.shutdown()
    return found


if __name__ == "__main__":
    fork_engines()
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))  # noqa: T201
