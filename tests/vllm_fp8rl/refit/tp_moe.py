"""Run by test_moe_parallel.py in a process of its own: engines over two ranks, one after another.

Each rank has half of the experts, or a half of each. Argument: folder with the checkpoints ``a``
and ``b`` of each kind. Prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import pytest
import torch
from tp_refit import error_of, pointers

from fp8rl import Recipe
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache
from support.engine import PROMPTS, Engine, load_tensors, start_engine
from support.mla import ALL, ON_A_CPU
from support.processes import fork_engines
from support.teacher_forced import vllm_logprobs
from support.towers import TEXT_ONLY
from vllm_fp8rl.refit import refit

EXPERTS, WIDTH, LAYER = 6, 192, "model.layers.1.mlp.experts"
DOWN = f"{LAYER}.5.down_proj.weight"


def stacks(worker) -> dict[str, list]:
    """Plain lists: the answer must not depend on how executors send tensors."""
    layer = worker.model_runner.get_model().get_submodule(f"{LAYER}.routed_experts")
    return {
        name: (p.data.view(torch.uint8) if p.element_size() == 1 else p.data).tolist()
        for name, p in layer.named_parameters()
    }


def expected(tensors: dict[str, torch.Tensor], rank: int, whole: bool) -> dict[str, list]:
    """One quantization of each local matrix, written out without vLLM."""
    found: dict[str, list] = {}
    width = WIDTH if whole else WIDTH // 2
    below, beside = (0, 0, 0, -width % 128), (0, -width % 128)
    half = EXPERTS // 2
    for expert in range(rank * half, (rank + 1) * half) if whole else range(EXPERTS):
        gate, up, down = (
            tensors[f"{LAYER}.{expert}.{leaf}_proj.weight"] for leaf in ("gate", "up", "down")
        )
        if not whole:
            gate, up, down = (m.chunk(2, d)[rank] for m, d in ((gate, 0), (up, 0), (down, 1)))
        matrices = {
            "w13": torch.cat([torch.nn.functional.pad(part, below) for part in (gate, up)]),
            "w2": torch.nn.functional.pad(down, beside),
        }
        for name, matrix in matrices.items():
            codes, scale_inv = quantize_block(matrix)
            found.setdefault(f"{name}_weight", []).append(codes.view(torch.uint8).tolist())
            found.setdefault(f"{name}_weight_scale_inv", []).append(scale_inv.tolist())
    return found


@contextmanager
def two_ranks(path: Path, recipe: Recipe, **arguments: Any) -> Iterator[Engine]:
    """An engine whose workers end with the region."""
    engine = start_engine(
        path,
        recipe,
        tensor_parallel_size=2,
        **{"enable_expert_parallel": True, **arguments},
    )
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


def experts(root: Path, whole: bool = True) -> dict[str, object]:
    """Qwen3 with experts, whole or in halves: codes, tokens, and a refit that lacks a tensor."""
    a, b = (load_tensors(root / name) for name in "ab")
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    with two_ranks(root / "a", recipe, enable_expert_parallel=whole) as engine:
        llm = engine.llm
        before, first = llm.collective_rpc(pointers), engine.greedy(PROMPTS)
        found: dict[str, object] = {}
        # Small batches: some have no tensor of an expert that a rank holds.
        refit(llm, b.items(), expect_kv_scales=False, batch_bytes=1 << 16)
        found["codes"] = llm.collective_rpc(stacks) == [expected(b, rank, whole) for rank in (0, 1)]
        found["b"] = second = engine.greedy(PROMPTS)
        refit(llm, a.items(), expect_kv_scales=False)
        found["there_and_back"] = engine.greedy(PROMPTS) == first != second
        short = {name: tensor for name, tensor in b.items() if name != DOWN}
        found["errors"] = [
            error_of(lambda: refit(llm, short.items(), expect_kv_scales=False)),
            error_of(lambda: engine.greedy(PROMPTS)),
        ]
        refit(llm, b.items(), expect_kv_scales=False)
        found["recovered"] = engine.greedy(PROMPTS) == second
        found["pointers"] = llm.collective_rpc(pointers) == before
    return found


def latent_attention(root: Path) -> list[list[list[int]]]:
    """Tokens with ``a``, ``b`` and ``a`` again: heads are split, what leads to latents is not."""
    with two_ranks(root / "a", ALL, **ON_A_CPU) as engine:
        tokens = [engine.greedy(PROMPTS)]
        for name in "ba":
            refit(engine.llm, load_tensors(root / name).items(), expect_kv_scales=False)
            tokens.append(engine.greedy(PROMPTS))
    return tokens


def delta_nets(root: Path) -> list[list[float]]:
    """Logprobs of a Qwen3.5 in float32 with ``a``, ``b`` and ``a`` again, heads split."""
    from support.gated_delta_net import compute_in_float32

    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float32(patch)  # before the ranks are forked
        with two_ranks(root / "a", recipe, **TEXT_ONLY) as engine:
            logprobs = [vllm_logprobs(engine).tolist()]
            for name in "ba":
                tensors = load_tensors(root / name)
                if name == "a":  # codes too, of q, k and v in one tensor
                    tensors = in_codes(tensors)
                report = refit(engine.llm, tensors.items(), expect_kv_scales=False)
                assert report.left_out > 0  # the tower
                logprobs.append(vllm_logprobs(engine).tolist())
    return logprobs


def in_codes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FP8 codes and scales for the linear layers of a language model beside a tower."""
    wire = dict(tensors)
    for name, tensor in tensors.items():
        if "language_model" in name and re.search(r"proj(_qkv|_z)?\.weight$", name):
            wire[name], wire[f"{name}_scale_inv"] = quantize_block(tensor)
    return wire


KINDS = {
    "experts": experts,
    "halves": partial(experts, whole=False),
    "latent": latent_attention,
    "delta": delta_nets,
}


def attempt(kind: str, folder: Path) -> dict[str, Any]:
    """What one kind gives, or how it failed: the others run all the same."""
    try:
        return {"found": KINDS[kind](folder)}
    except Exception:
        return {"failed": traceback.format_exc()}


if __name__ == "__main__":
    fork_engines()
    root = Path(sys.argv[1])
    made = [kind for kind in KINDS if (root / kind).is_dir()]
    print(json.dumps({kind: attempt(kind, root / kind) for kind in made}))  # noqa: T201
