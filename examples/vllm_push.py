"""Weights from a trainer's process into an engine's process, over a connection of two ends.

Run it: ``python examples/vllm_push.py my-model``, on a CPU behind ``VLLM_CPU_KVCACHE_SPACE=1``, the
GiB of the KV cache. ``my-model`` is a checkpoint of one file, ``model.safetensors``. The trainer
sends one tensor after the other and waits for each to be taken; :func:`vllm_fp8rl.refit.refit`
reads them as they come. If the trainer dies, or leaves a tensor out, the engine refuses to
generate until a later refit is complete.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, load_file, save

from fp8rl.kv_scales import parse_scale_name

if TYPE_CHECKING:
    from vllm import LLM

END = b""


def push(trainer: Connection, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The trainer's end. HF names; BF16 weights and KV scales alike."""
    for name, tensor in tensors:
        trainer.send_bytes(save({name: tensor.detach().cpu().contiguous()}))
        trainer.recv_bytes()  # taken: the tensor may change now
    trainer.send_bytes(END)


def pull(engine: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """The engine's end: what :func:`~vllm_fp8rl.refit.refit` reads."""
    while (message := engine.recv_bytes()) != END:
        yield from load(message).items()
        engine.send_bytes(b"taken")


def serve(model: str, engine: Connection, arguments: dict) -> None:
    """The engine's process: one refit, one answer."""
    from vllm import LLM, SamplingParams

    from fp8rl import Recipe
    from vllm_fp8rl import engine_args

    recipe = Recipe.from_dict({"kv_cache": {"dtype": "auto"}})
    llm = LLM(
        model,
        load_format="dummy",
        **engine_args(recipe) | arguments,
    )
    try:
        refit_from(llm, engine)
        sampling = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling, use_tqdm=False)
        engine.send(list(output.outputs[0].token_ids))
    finally:
        llm.llm_engine.engine_core.shutdown()  # or this process waits for its core for ever


def refit_from(llm: LLM, engine: Connection) -> None:
    from vllm_fp8rl.refit import refit

    report = refit(llm, pull(engine), expect_kv_scales=False)
    print(f"{report.tensors} tensors in {report.seconds:.2f} s")  # noqa: T201


def main(model: str, arguments: dict) -> list[int]:
    """The trainer's process; tokens that the engine generates with its weights."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(model, theirs, arguments))
    process.start()
    theirs.close()
    tensors = load_file(Path(model) / "model.safetensors").items()
    # The engine's cache is in BF16 and takes no KV scales.
    push(ours, [(name, tensor) for name, tensor in tensors if parse_scale_name(name) is None])
    tokens = ours.recv()
    process.join()
    return tokens


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "model.safetensors").is_file():
        sys.exit("usage: python examples/vllm_push.py FOLDER_WITH_A_model.safetensors")
    try:
        print(main(sys.argv[1], {}))  # noqa: T201
    except EOFError:
        sys.exit("The engine's process has ended; its error is above.")
