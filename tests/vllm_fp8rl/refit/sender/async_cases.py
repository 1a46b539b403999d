"""Run by test_asynchronous.py with a folder of checkpoints: an AsyncLLM and its core."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import httpx
import torch
from safetensors.torch import save_file

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import RefitError
from support.engine import KV_SCALE, PROMPTS, SCALES, load_tensors
from support.processes import fork_engines
from vllm_fp8rl.refit.receiver.worker import RefitMixin
from vllm_fp8rl.refit.sender.asynchronous import refit_async

LONG = [7, 8, 9]
LENGTH = 48
NORM = "model.norm.weight"


class OtherFramework:
    """What a framework puts into the one slot for worker extensions."""

    def rank_of_model(self) -> int:
        return self.rank  # type: ignore[attr-defined]


class Extension(RefitMixin, OtherFramework):
    pass


class Client:
    """Greedy requests to one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests = 0
        self.spans: list[list[Any]] = []
        """Weight versions of the last answer, where vLLM has them."""

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

    async def started(self, prompt: list[int], tokens: int) -> tuple[asyncio.Task, asyncio.Event]:
        """A long request that has given its first tokens."""
        event = asyncio.Event()

        async def run() -> tuple[list[int], str]:
            last: tuple[list[int], str] = ([], "")
            async for last in self.stream(prompt, tokens):
                if len(last[0]) >= 5:
                    event.set()
            return last

        task = asyncio.ensure_future(run())
        await event.wait()
        return task, event


async def error_of(attempt: Awaitable[object]) -> str:
    try:
        await attempt
    except (RefitError, asyncio.CancelledError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


async def until_paused(engine: Any) -> None:
    while not await engine.is_paused():
        await asyncio.sleep(0.001)


async def cases(engine: Any, root: Path) -> dict[str, object]:
    a, b = (load_tensors(root / name) for name in "ab")
    client = Client(engine)
    found: dict[str, Any] = {}

    async def give(tensors: dict[str, torch.Tensor], **options: Any) -> Any:
        return await refit_async(engine, tensors.items(), expect_kv_scales=False, **options)

    found["extension"] = await engine.collective_rpc("rank_of_model")
    try:
        await client.one(LONG)
    except Exception as error:  # vLLM's own, behind which the text is
        found["without_scales"] = str(error.__cause__ or error)
    await refit_async(engine, (a | SCALES).items(), expect_kv_scales=True)
    found["a"] = await client.greedy()
    report = await refit_async(
        engine, (b | SCALES).items(), expect_kv_scales=True, batch_bytes=1 << 18
    )
    found["report"] = [report.tensors, report.kv_scales]
    found["b"] = await client.greedy()
    found["long_b"] = (await client.one(LONG, LENGTH))[0]
    await refit_async(engine, a.items(), expect_kv_scales=False)
    found["a_again"] = await client.greedy()
    found["long_a"] = (await client.one(LONG, LENGTH))[0]

    task, _ = await client.started(LONG, LENGTH)
    await give(b)
    found["drained"] = [*(await task), await client.greedy()]
    await give(a)
    task, _ = await client.started(LONG, LENGTH)
    await give(b, in_flight="abort")
    found["aborted"] = await task
    await give(a)
    task, _ = await client.started(LONG, LENGTH)
    version = {"weight_version": "b"} if hasattr(engine, "update_weight_version") else {}
    await give(b, in_flight="keep", **version)
    kept = (await task)[0]
    found["spans"] = client.spans
    found["kept"] = await split_of(kept, client, found["long_a"])

    await give(a)
    task, _ = await client.started(LONG, LENGTH)
    same = await refit_async(
        engine, (a | SCALES).items(), expect_kv_scales=True, in_flight="continue"
    )
    found["continued"] = [*(await task), same.scale_epoch]
    grown = {name: scale * 4 for name, scale in SCALES.items()}
    task, _ = await client.started(LONG, LENGTH)
    other = await refit_async(
        engine, (b | grown).items(), expect_kv_scales=True, in_flight="continue"
    )
    found["grown"] = [other.scale_epoch, *await split_of((await task)[0], client, found["long_a"])]
    await refit_async(engine, (b | SCALES).items(), expect_kv_scales=True)

    # The cache is outdated before the refit, which brings the scales that are in service.
    found["outdated"] = [await client.greedy()]
    for step, scales, sent in (
        ("fp8rl_observe_kv", {}, SCALES),  # a calibration that nobody ends
        ("fp8rl_set_kv_scales", {name: float(scale) for name, scale in grown.items()}, grown),
    ):
        await engine.collective_rpc(step, args=(scales,))
        await refit_async(engine, (b | sent).items(), expect_kv_scales=True, in_flight="continue")
        found["outdated"].append(await client.greedy())
    await refit_async(engine, (b | SCALES).items(), expect_kv_scales=True)

    # b -> a, with a request and a second refit that come meanwhile.
    first = asyncio.ensure_future(give(a, batch_bytes=1))
    await until_paused(engine)
    waiting = asyncio.ensure_future(client.one(PROMPTS[0]))
    found["second"] = await error_of(give(b))
    await first
    found["waited"] = (await waiting)[0]

    found["refused"] = [await error_of(give({"model.unknown": a[NORM]})), await client.greedy()]

    # Broken off after a write: closed to all, then a complete refit serves.
    broken = dict(b)
    broken[NORM] = torch.full_like(b[NORM], torch.nan)
    first = asyncio.ensure_future(error_of(give(broken, batch_bytes=1)))
    await until_paused(engine)
    waiting = asyncio.ensure_future(client.one(PROMPTS[0]))
    found["nan"] = [await first, await waiting, await error_of(client.greedy())]
    await give(b)
    found["after_nan"] = await client.greedy()

    def slow_stop() -> Any:
        for number, item in enumerate(a.items()):
            if number == 9:
                asyncio.get_running_loop().call_soon(first.cancel)
            yield item

    first = asyncio.ensure_future(
        refit_async(engine, slow_stop(), expect_kv_scales=False, batch_bytes=1)
    )
    found["cancelled"] = [await error_of(first), await error_of(client.greedy())]
    await give(a)
    task, _ = await client.started(LONG, LENGTH)
    first = asyncio.ensure_future(give(b))
    await until_paused(engine)
    first.cancel()
    found["cancelled_early"] = [await error_of(first), *(await task), await client.greedy()]

    await engine.pause_generation(mode="abort")
    await give(b)
    found["still_paused"] = await engine.is_paused()
    await engine.resume_generation()
    found["resumed"] = await client.greedy()

    found["doc"] = await as_documented(engine, client, b)
    found["http"] = await over_http(engine, client, str(root / "a"))
    (place,) = await engine.collective_rpc("fp8rl_refit_place")

    def killing() -> Any:
        for number, item in enumerate(a.items()):
            if number == 5:
                os.kill(int(place["value"]["process"]), 9)
            yield item

    killed = refit_async(engine, killing(), expect_kv_scales=False, batch_bytes=1)
    found["killed"] = [await error_of(killed), await error_of(client.greedy())]
    return found


async def split_of(tokens: list[int], client: Client, old: Any) -> list[object]:
    """How many tokens are those of ``old``, and whether the others are of the engine as it is."""
    split = next(i for i, (x, y) in enumerate(zip(tokens, old, strict=True)) if x != y)
    rest = (await client.one(LONG + tokens[:split], LENGTH - split))[0]
    return [split, tokens[split:] == rest]


async def as_documented(engine: Any, client: Client, weights: object) -> list[list[int]]:
    """The code block of docs/vllm.md."""
    text = Path(vllm_fp8rl.__file__).parents[1].joinpath("docs", "vllm.md").read_text("utf-8")
    code = text.split("\n## `AsyncLLM`\n")[1].split("```")[1].removeprefix("python\n")
    compiled = compile(code, "docs/vllm.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(compiled, {"engine": engine, "weights": weights})
    return await client.greedy()


async def over_http(engine: Any, client: Client, folder: str) -> list[object]:
    """The routes of vLLM's development mode, on this engine, as examples/ calls them."""
    from fastapi import FastAPI

    try:
        from vllm.entrypoints.rl.online import api_router as rl
    except ImportError:  # up to vLLM 0.31
        from vllm.entrypoints.serve.dev.rlhf import api_router as rl
    from vllm.entrypoints.serve.dev.cache import api_router as cache
    from vllm.entrypoints.serve.dev.rpc import api_router as rpc
    from vllm_serve_refit import refit_over_http, set_kv_scales

    app = FastAPI()
    app.state.engine_client = engine
    for module in (rl, cache, rpc):
        app.include_router(module.router)
    transport = httpx.ASGITransport(app)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

        def post(path: str, **arguments: Any) -> httpx.Response:
            sent = asyncio.run_coroutine_threadsafe(http.post(path, **arguments), loop)
            answer = sent.result()
            if not answer.is_success:
                raise RuntimeError(answer.text)
            return answer

        half = Path(folder).parent / "half"
        half.mkdir()
        tensors = load_tensors(Path(folder))
        del tensors[NORM]
        save_file(tensors, half / "model.safetensors")
        lacking = await raised(asyncio.to_thread(refit_over_http, post, str(half)))
        closed = [lacking, await engine.is_paused()]
        await asyncio.to_thread(refit_over_http, post, folder)
        tokens = await client.greedy()
        one = dict.fromkeys(SCALES, 2 * KV_SCALE)
        await asyncio.to_thread(set_kv_scales, post, one)
        other = await client.greedy()
        error = await raised(asyncio.to_thread(set_kv_scales, post, {next(iter(one)): -1.0}))
        await asyncio.to_thread(set_kv_scales, post, dict.fromkeys(SCALES, KV_SCALE))
        return [tokens, other, await client.greedy(), error, closed]


async def raised(attempt: Awaitable[object]) -> str:
    try:
        await attempt
    except Exception as error:
        return str(error)
    return "none"


def main(root: Path) -> dict[str, object]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    fork_engines()
    # As `vllm serve` reads them.
    flags = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        [
            *("--model", str(root / "a")),
            *("--quantization", "fp8rl", "--kv-cache-dtype", "fp8_e4m3"),
            *("--additional-config", json.dumps({"fp8rl": Recipe().to_dict()})),
            *("--weight-transfer-config", json.dumps({"backend": "fp8rl"})),
            *("--worker-extension-cls", f"{Extension.__module__}.{Extension.__qualname__}"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
            *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(32 << 20)),
            *("--skip-tokenizer-init", "--seed", "0"),
        ]
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(flags))
    try:
        return asyncio.run(cases(engine, root))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    # The engine core imports the extension by name.
    from async_cases import main as named_main

    print(json.dumps(named_main(Path(sys.argv[1]))))  # noqa: T201
