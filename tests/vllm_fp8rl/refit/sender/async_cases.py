"""Refits of an AsyncLLM with requests in flight, one case each; run by test_asynchronous.py.

python async_cases.py FOLDER    # with checkpoints "a" and "b", and in "truth.json" what another
                                # engine says to PROMPTS with each, and to LONG: "long_a", "long_b"
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import httpx
import pytest
import torch
from safetensors.torch import save_file

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import RefitError
from support.cases import Cases
from support.engine import KV_SCALE, LAYERS, PROMPTS, SCALES, SETTINGS, load_tensors
from support.processes import fork_engines
from vllm_fp8rl.refit.receiver.worker import RefitMixin
from vllm_fp8rl.refit.sender.asynchronous import refit_async

LONG, LENGTH = [7, 8, 9], 48
NORM = "model.norm.weight"
GROWN = {name: scale * 4 for name, scale in SCALES.items()}
HALF_UPDATED = "^The weights are half-updated"
Tensors = dict[str, torch.Tensor]


class OtherFramework:
    """What a framework puts into the one slot for worker extensions."""

    def rank_of_model(self) -> int:
        return self.rank  # type: ignore[attr-defined]


class Extension(RefitMixin, OtherFramework):
    pass


class Served:
    """The engine, its checkpoints, and what is asked of it; every answer is greedy."""

    def __init__(self, engine: Any, root: Path) -> None:
        self.engine, self.root = engine, root
        self.a, self.b = (load_tensors(root / name) for name in "ab")
        self.truth = json.loads((root / "truth.json").read_text())
        self.requests = 0
        self.spans: list[list[Any]] = []
        """Weight versions of the last answer, where vLLM has them."""

    async def give(self, tensors: Tensors, **options: Any) -> Any:
        announced = bool(SCALES.keys() & tensors)
        return await refit_async(
            self.engine, tensors.items(), expect_kv_scales=announced, **options
        )

    async def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[tuple[list[int], str]]:
        from vllm import SamplingParams

        self.requests += 1
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompt_of = {"prompt_token_ids": prompt}
        async for output in self.engine.generate(prompt_of, parameters, str(self.requests)):
            (only,) = output.outputs
            spans = getattr(only, "weight_versions", None) or ()
            self.spans = [[span.version, span.start, span.end] for span in spans]
            yield list(only.token_ids), str(only.finish_reason)

    async def one(self, prompt: list[int], tokens: int = 12) -> tuple[list[int], str]:
        return [output async for output in self.stream(prompt, tokens)][-1]

    async def greedy(self) -> list[list[int]]:
        return [(await self.one(prompt))[0] for prompt in PROMPTS]

    async def serves(self, name: str) -> bool:
        return await self.greedy() == self.truth[name]

    async def refuses(self, match: str = HALF_UPDATED) -> None:
        with pytest.raises(RefitError, match=match):
            await self.one(PROMPTS[0])

    async def started(self) -> asyncio.Task[tuple[list[int], str]]:
        """A long request that has given its first tokens."""
        event = asyncio.Event()

        async def run() -> tuple[list[int], str]:
            last: tuple[list[int], str] = ([], "")
            async for last in self.stream(LONG, LENGTH):
                if len(last[0]) >= 5:
                    event.set()
            return last

        task = asyncio.ensure_future(run())
        await event.wait()
        return task

    async def while_paused(self, tensors: Tensors) -> asyncio.Task[Any]:
        """A refit that has begun."""
        task = asyncio.ensure_future(self.give(tensors, batch_bytes=1))
        while not await self.engine.is_paused():
            await asyncio.sleep(0.001)
        return task

    async def goes_on_with_the_new_weights(self, tokens: list[int]) -> bool:
        """Whether the first tokens are those of ``a``, and the others of the engine as it is."""
        old = self.truth["long_a"]
        split = next(i for i, (x, y) in enumerate(zip(tokens, old, strict=True)) if x != y)
        rest = (await self.one(LONG + tokens[:split], LENGTH - split))[0]
        return 5 <= split < LENGTH and tokens[split:] == rest


case = Cases()
"""Each begins with ``a`` but the first, which has no KV scales yet."""


@case
async def a_request_without_kv_scales_is_refused_and_ends_no_engine(s: Served) -> None:
    with pytest.raises(Exception) as error:  # vLLM's own, behind which the text is
        await s.one(LONG)
    said = str(error.value.__cause__ or error.value)
    assert said.startswith("KV scale 'model.layers.0.self_attn.k_scale' was never loaded (")


@case
async def there_and_back(s: Served) -> None:
    assert await s.engine.collective_rpc("rank_of_model") == [0]  # of the other extension
    assert await s.serves("a")
    report = await s.give(s.b | SCALES, batch_bytes=1 << 18)
    assert (report.tensors, report.kv_scales) == (len(s.b) + 2 * LAYERS, 2 * LAYERS)
    assert await s.serves("b")
    await s.give(s.a)
    assert await s.serves("a")


@case
async def drain_lets_requests_end_with_the_old_weights(s: Served) -> None:
    task = await s.started()
    await s.give(s.b)
    assert await task == (s.truth["long_a"], "length")
    assert await s.serves("b")


@case
async def abort_ends_requests_at_once(s: Served) -> None:
    task = await s.started()
    await s.give(s.b, in_flight="abort")
    tokens, reason = await task
    assert reason == "abort"
    assert len(tokens) < LENGTH and tokens == s.truth["long_a"][: len(tokens)]


@case
async def keep_goes_on_with_the_new_weights(s: Served) -> None:
    """Where vLLM has weight versions, the spans of an answer tell which made them."""
    task = await s.started()
    version = {"weight_version": "b"} if hasattr(s.engine, "update_weight_version") else {}
    await s.give(s.b, in_flight="keep", **version)
    tokens, _ = await task
    if version:
        before, after = s.spans
        assert before[:2] == ["default", 0] and before[2] >= 5
        assert after == ["b", before[2], LENGTH]
    assert await s.goes_on_with_the_new_weights(tokens)


@case
async def continue_goes_on_with_the_codes_it_has(s: Served) -> None:
    task = await s.started()
    same = await s.give(s.a | SCALES, in_flight="continue")
    assert await task == (s.truth["long_a"], "length")
    task = await s.started()
    grown = await s.give(s.b | GROWN, in_flight="continue")  # keys are computed again
    assert grown.scale_epoch == same.scale_epoch + 1
    assert await s.goes_on_with_the_new_weights((await task)[0])


@case
async def what_comes_meanwhile_waits_or_is_refused(s: Served) -> None:
    first = await s.while_paused(s.b)
    waiting = asyncio.ensure_future(s.one(PROMPTS[0]))
    with pytest.raises(RefitError, match="A refit of this engine is already under way"):
        await s.give(s.a)
    await first
    assert (await waiting)[0] == s.truth["b"][0]


@case
async def refused_before_a_write_leaves_the_old_weights(s: Served) -> None:
    with pytest.raises(RefitError, match=r"model has no tensor 'model\.unknown'"):
        await s.give({"model.unknown": s.a[NORM]})
    assert await s.serves("a")


@case
async def broken_off_after_a_write_closes_the_engine_until_a_complete_refit(s: Served) -> None:
    first = await s.while_paused(s.b | {NORM: s.b[NORM] * torch.nan})
    waiting = asyncio.ensure_future(s.one(PROMPTS[0]))
    with pytest.raises(RefitError, match=f"'{NORM}' has NaN"):
        await first
    assert await waiting == ([], "abort")
    await s.refuses()
    await s.give(s.b)
    assert await s.serves("b")


@case
async def cancelled_before_and_after_a_write(s: Served) -> None:
    task = await s.started()
    first = await s.while_paused(s.b)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await task == (s.truth["long_a"], "length")
    assert await s.serves("a")

    def slow_stop() -> Any:
        for number, item in enumerate(s.b.items()):
            if number == 9:
                asyncio.get_running_loop().call_soon(first.cancel)
            yield item

    first = asyncio.ensure_future(
        refit_async(s.engine, slow_stop(), expect_kv_scales=False, batch_bytes=1)
    )
    with pytest.raises(asyncio.CancelledError):
        await first
    await s.refuses()


@case
async def a_paused_engine_stays_paused(s: Served) -> None:
    await s.engine.pause_generation(mode="abort")
    await s.give(s.b)
    assert await s.engine.is_paused()
    await s.engine.resume_generation()
    assert await s.serves("b")


@case
async def as_documented(s: Served) -> None:
    """The code block of docs/vllm.md."""
    text = Path(vllm_fp8rl.__file__).parents[1].joinpath("docs", "vllm.md").read_text("utf-8")
    code = text.split("\n## `AsyncLLM`\n")[1].split("```")[1].removeprefix("python\n")
    compiled = compile(code, "docs/vllm.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(compiled, {"engine": s.engine, "weights": s.b})
    assert await s.serves("b")


@case
async def over_http(s: Served) -> None:
    """The routes of vLLM's development mode, as examples/vllm_serve_refit.py calls them."""
    from fastapi import FastAPI

    try:
        from vllm.entrypoints.rl.online import api_router as rl
    except ImportError:  # up to vLLM 0.31
        from vllm.entrypoints.serve.dev.rlhf import api_router as rl
    from vllm.entrypoints.serve.dev.cache import api_router as cache
    from vllm.entrypoints.serve.dev.rpc import api_router as rpc
    from vllm_serve_refit import refit_over_http, set_kv_scales

    app = FastAPI()
    app.state.engine_client = s.engine
    for module in (rl, cache, rpc):
        app.include_router(module.router)
    loop = asyncio.get_running_loop()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

        def post(path: str, **arguments: Any) -> httpx.Response:
            sent = asyncio.run_coroutine_threadsafe(http.post(path, **arguments), loop)
            answer = sent.result()
            if not answer.is_success:
                raise RuntimeError(answer.text)
            return answer

        async def call(function: Callable[..., Any], argument: Any) -> None:
            await asyncio.to_thread(function, post, argument)

        half = s.root / "half"
        half.mkdir()
        lacking = {name: tensor for name, tensor in s.b.items() if name != NORM}
        save_file(lacking, half / "model.safetensors")
        with pytest.raises(Exception, match=f"lacks 1 of the model's tensors: '{NORM}'"):
            await call(refit_over_http, str(half))
        assert await s.engine.is_paused()
        await call(refit_over_http, str(s.root / "b"))
        assert await s.serves("b")
        with pytest.raises(Exception, match=r"ScaleError.*k_scale' is -1\.0"):
            await call(set_kv_scales, {next(iter(SCALES)): -1.0})
        await call(set_kv_scales, dict.fromkeys(SCALES, KV_SCALE / 100))  # values are cut off
        assert not await s.serves("b")


@case
async def a_killed_engine_core_is_an_error_not_a_wait(s: Served) -> None:
    (place,) = await s.engine.collective_rpc("fp8rl_refit_place")

    def killing() -> Any:
        for number, item in enumerate(s.b.items()):
            if number == 5:
                os.kill(int(place["value"]["process"]), 9)
            yield item

    with pytest.raises(RefitError, match=r"^Step 'fp8rl_refit_load_batch' .*restart the engine\.$"):
        await refit_async(s.engine, killing(), expect_kv_scales=False, batch_bytes=1)
    await s.refuses()


async def run_all(engine: Any, root: Path) -> dict[str, str]:
    served = Served(engine, root)
    return await case.run_all(served, lambda: served.give(served.a | SCALES))


def main(root: Path) -> dict[str, str]:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    fork_engines()
    arguments: dict[str, Any] = vllm_fp8rl.engine_args(Recipe()) | SETTINGS
    arguments["worker_extension_cls"] = f"{Extension.__module__}.{Extension.__qualname__}"
    transfer = WeightTransferConfig(backend="fp8rl")
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(root / "a"), weight_transfer_config=transfer, **arguments)
    )
    try:
        return asyncio.run(run_all(engine, root))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    # The engine core imports the extension by name.
    from async_cases import main as named_main

    print(json.dumps(named_main(Path(sys.argv[1]))))  # noqa: T201
