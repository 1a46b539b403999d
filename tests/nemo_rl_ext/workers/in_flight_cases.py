"""Run by test_in_flight.py with a folder of checkpoints: refits of an AsyncLLM as a worker's."""

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
from fp8rl.kv_scales import scale_names
from nemo_rl_ext.workers.in_flight import RefitInFlight
from nemo_rl_ext.workers.refit import StreamedRefit, kv_codes_outdated, may_run
from nemo_rl_ext.workers.rollout_engine import UPSTREAM_EXTENSION, RolloutEngine
from support.engine import KV_SCALE, LAYERS, SETTINGS, load_tensors, register_model
from support.processes import fork_engines

LONG, LENGTH = [7, 8, 9], 120
GROWN = 4 * KV_SCALE


class Extension:
    """Stands for our extension of vLLM's worker, whose base class needs NeMo RL."""

    def load(self, path: str, scale: float) -> bool:
        import torch

        names = scale_names(LAYERS, ("k", "v"))
        with self.refit() as refit:
            refit.load(list(load_tensors(Path(path)).items()))
            refit.load([(name, torch.tensor([scale])) for name in names])
            refit.finish()
        return True

    def load_part(self, path: str, tensors: int) -> bool:
        """Break off after some tensors, as upstream's method does: with an answer, no error."""
        import contextlib

        with contextlib.suppress(RuntimeError), self.refit() as refit:
            refit.load(list(load_tensors(Path(path)).items())[:tensors])
            raise RuntimeError("the sender is gone")
        return False

    def refit(self) -> StreamedRefit:
        return StreamedRefit(self.model_runner.model, fp8_kv=True)  # type: ignore[attr-defined]

    def may_run(self) -> bool:
        return may_run(self.model_runner.model)  # type: ignore[attr-defined]

    def kv_codes_outdated(self) -> bool:
        return kv_codes_outdated(self.model_runner.model)  # type: ignore[attr-defined]


class Upstream:
    """What the mixins need of NeMo RL's asynchronous vLLM worker."""

    def __init__(self) -> None:
        self.cfg = {"vllm_cfg": {"async_engine": True}}
        self.llm: Any = None
        self.requests = 0
        self.method = "load"
        self.next: tuple[str, float] = ("", 0.0)

    async def generate(self, prompt: list[int], tokens: int, begun: Any = None) -> list[int]:
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
            if begun is not None and len(last) >= 5:
                begun.set()
        return last

    async def update_weights_via_ipc_zmq_async(self) -> bool:
        return await self.update_weights_from_collective_async()

    async def update_weights_from_collective_async(self) -> bool:
        return all(await self.llm.collective_rpc(self.method, args=self.next))

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**llm_kwargs))


class Worker(RefitInFlight, RolloutEngine, Upstream):
    worker_extension = f"{Path(__file__).stem}.{Extension.__name__}"


async def main(root: Path) -> dict[str, Any]:
    register_model(root / "a")
    worker = Worker()
    recipe = Recipe.from_dict({"kv_cache": {"recalibrate": "grow"}})
    arguments = {
        "model": str(root / "a"),
        **SETTINGS,
        **vllm_fp8rl.engine_args(recipe),
        "worker_extension_cls": UPSTREAM_EXTENSION,
    }
    worker._create_engine(arguments)

    async def refit(name: str, scale: float) -> bool:
        worker.next = (str(root / name), scale)
        return await worker.update_weights_from_collective_async()

    async def started() -> asyncio.Task[list[int]]:
        begun = asyncio.Event()
        task = asyncio.ensure_future(worker.generate(LONG, LENGTH, begun))
        await begun.wait()
        return task

    found: dict[str, Any] = {"first": await refit("a", KV_SCALE)}
    found["a"] = await worker.generate(LONG, LENGTH)
    task = await started()
    found["same"] = [await refit("a", KV_SCALE), await task]

    task = await started()
    found["grown"] = await refit("b", GROWN)
    tokens = await task
    pairs = zip(tokens, found["a"], strict=True)
    split = next(i for i, (new, old) in enumerate(pairs) if new != old)
    rest = await worker.generate(LONG + tokens[:split], LENGTH - split)
    found["split"] = [split, tokens[split:] == rest]

    await worker.llm.pause_generation(mode="abort")
    worker.next = (str(root / "a"), KV_SCALE)
    found["by_ipc"] = await worker.update_weights_via_ipc_zmq_async()
    found["still_paused"] = await worker.llm.is_paused()
    await worker.llm.resume_generation()
    found["a_again"] = await worker.generate(LONG, LENGTH)

    worker.method = "load_part"
    task = await started()
    found["unchanged"] = [await refit("b", 0), await task]
    task = await started()
    found["broken_off"] = [await refit("b", 3), await worker.llm.is_paused(), task.done()]
    worker.method = "load"
    found["mended"] = [await refit("a", KV_SCALE), await worker.llm.is_paused(), await task]
    worker.llm.shutdown()
    return found


if __name__ == "__main__":
    fork_engines()
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))  # noqa: T201
