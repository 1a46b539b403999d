"""Run by test_vllm_executors.py in a process of its own, once for each way to run workers.

Arguments: ``core`` (engine core in a process of its own, vLLM's default), ``async`` (AsyncLLM),
``mp`` or ``ray`` (two ranks), ``ipc`` or ``nccl`` (vLLM's trainer); folder for checkpoints. Prints
one JSON object on its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

import torch
from safetensors.torch import load_file

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import Fp8RLError
from fp8rl.kv_scales import scale_names
from support.gpu_engine import LAYERS, PROMPTS, make_checkpoints
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.sender.asynchronous import refit_async
from vllm_fp8rl.refit.transport import Sender

NORM = "model.norm.weight"
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 28,
    "gpu_memory_utilization": 0.1,  # must be free at the start; the line above is what counts
    "skip_tokenizer_init": True,
    "seed": 0,
}
# One request at a time: a batch of another size may round otherwise.
FEW = PROMPTS[:3]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    scales = {name: torch.tensor([0.05]) for name in scale_names(LAYERS, ("q", "k", "v"))}
    return load_file(path / "model.safetensors") | scales


def on_gpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights on the GPU, one of them with other strides; scales stay where they are."""
    moved = {n: t.cuda() if n.endswith("weight") else t for n, t in tensors.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    moved[name] = moved[name].T.contiguous().T
    return moved


def through_one_buffer(tensors: dict[str, torch.Tensor]):
    """A trainer that reuses its export buffer once the tensor before has been acknowledged."""
    buffer = torch.empty(max(t.numel() for t in tensors.values()), dtype=torch.bfloat16).cuda()
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)
        else:
            yield name, tensor


def error_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except Fp8RLError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run_llm(root: Path, **changes: Any) -> dict[str, object]:
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    changes["weight_transfer_config"] = WeightTransferConfig(backend="fp8rl")
    parameters = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    llm = LLM(str(root / "a"), **ARGUMENTS | vllm_fp8rl.engine_args(Recipe()) | changes)

    def greedy() -> list[list[int]]:
        outputs = [
            llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)[0]
            for prompt in FEW
        ]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def give(tensors: Any, **options: Any) -> Any:
        return refit(llm, tensors, expect_kv_scales=True, **options)

    a, b = (tensors_of(root / name) for name in "ab")
    near_a, near_b = on_gpu(a), on_gpu(b)
    found: dict[str, object] = {}
    places = [answer["value"] for answer in llm.collective_rpc("fp8rl_refit_place")]
    sender = Sender(places, 1 << 20)
    found["ranks"] = len(places)
    found["near"] = [sender.near(near_a[NORM]), sender.near(a[NORM])]
    found["own_process"] = all(each["process"] != str(os.getpid()) for each in places)
    give(a.items())
    found["a"] = greedy()
    give(b.items())
    found["b"] = greedy()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    give(near_a.items())
    found["near_a"] = greedy()
    # 64 KiB of staging: the larger tensors are read where they lie.
    give(near_b.items(), batch_bytes=1 << 12)
    found["near_b"] = greedy()
    give(through_one_buffer(near_a), batch_bytes=1)
    found["one_buffer"] = greedy()
    torch.cuda.ipc_collect()
    found["kept_bytes"] = torch.cuda.memory_allocated() - before
    broken = dict(near_b)
    broken[NORM] = torch.full_like(near_b[NORM], torch.nan)
    found["nan"] = [
        error_of(lambda: give(broken.items(), batch_bytes=1)),
        error_of(greedy),
    ]
    started = time.perf_counter()
    report = give(near_b.items())
    found["seconds"] = [report.seconds, time.perf_counter() - started]
    found["after_nan"] = greedy()
    for name in "ab":  # vLLM's own ways
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(root / name)})
        llm.reset_prefix_cache()
        found[f"reloaded_{name}"] = greedy()
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    with Sender(places, 1 << 20) as sender:
        for item in near_a.items():
            llm.update_weights({"update_info": {"payload": sender.wrap([item])}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    found["updated_a"] = greedy()
    return found


def run_trainer(transport: str, root: Path) -> dict[str, object]:
    """vLLM's trainer, unchanged, on the engine's GPU (``ipc``) or the next one (``nccl``)."""
    from vllm import LLM
    from vllm.utils.network_utils import get_open_port

    from support.weight_transfer import trainer

    config = {"weight_transfer_config": {"backend": f"fp8rl_{transport}"}}
    llm = LLM(str(root / "a"), **ARGUMENTS | vllm_fp8rl.engine_args(Recipe()) | config)
    device = torch.device("cuda", int(transport == "nccl"))
    torch.cuda.set_device(device)
    sent = {name: [(n, t.to(device)) for n, t in tensors_of(root / name).items()] for name in "ab"}

    def bits() -> str:
        (digest,) = llm.collective_rpc(digest_of)
        return digest

    found: dict[str, object] = {}
    for name in "ab":
        refit(llm, tensors_of(root / name).items(), expect_kv_scales=True)
        found[name] = bits()
    for packed in (True, False):
        options: dict[str, Any] = {"packed": packed, "packed_buffer_size_bytes": 1 << 20}
        if transport == "nccl":
            options |= {"master_address": "127.0.0.1", "world_size": 2}
        items = list(sent["a"])

        def send(items: list[tuple[str, torch.Tensor]], options: dict[str, Any] = options) -> Any:
            port = {"master_port": get_open_port()} if transport == "nccl" else {}
            return trainer(llm, transport, items, **options, **port)

        sender = send(items)
        for name in "ab":
            items[:] = sent[name]
            sender.send_weights()
            found[f"{name}, packed {packed}"] = bits()
        wrong = [(n, t[1:] if n == NORM else t) for n, t in sent["a"]]
        try:
            send(wrong).send_weights()
        except Exception as error:
            found[f"refused, packed {packed}"] = str(error)
        found[f"b, then, packed {packed}"] = bits()
    return found


def digest_of(worker: Any) -> str:
    """Hash every parameter's bytes; run in the worker."""
    import hashlib

    digest = hashlib.sha256()
    for _, parameter in sorted(worker.model_runner.get_model().named_parameters()):
        digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


async def run_async(root: Path) -> dict[str, object]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = ARGUMENTS | vllm_fp8rl.engine_args(Recipe())
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(root / "a"), **arguments))
    requests = 0

    async def one(prompt: list[int], tokens: int) -> list[int]:
        nonlocal requests
        requests += 1
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        outputs = engine.generate({"prompt_token_ids": prompt}, parameters, str(requests))
        return [list(output.outputs[0].token_ids) async for output in outputs][-1]

    async def greedy() -> list[list[int]]:
        return [await one(prompt, 16) for prompt in FEW]

    async def give(tensors: dict[str, torch.Tensor], **options: Any) -> Any:
        return await refit_async(engine, tensors.items(), expect_kv_scales=True, **options)

    a, b = (tensors_of(root / name) for name in "ab")
    found: dict[str, object] = {}
    try:
        await give(a)
        found["a"] = await greedy()
        await give(b)
        found["b"] = await greedy()
        await give(on_gpu(a))
        found["near_a"] = await greedy()
        long = asyncio.ensure_future(one(FEW[0], 400))
        await asyncio.sleep(0.5)
        await give(on_gpu(b), in_flight="keep")
        found["near_b"] = await greedy()
        found["kept"] = len(await long)
    finally:
        engine.shutdown()
    return found


def main(mode: str, root: Path) -> dict[str, object]:
    make_checkpoints(root)
    if mode == "async":
        return asyncio.run(run_async(root))
    if mode == "core":
        return run_llm(root)
    if mode in ("ipc", "nccl"):
        return run_trainer(mode, root)
    return run_llm(root, tensor_parallel_size=2, distributed_executor_backend=mode)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))  # noqa: T201
