"""Run by test_moe_parallel.py in a process of its own: two ranks, each with half of the experts.

Argument: folder with checkpoints ``a`` and ``b``. Prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import torch
from tp_refit import error_of, pointers

from fp8rl import Recipe
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache
from support.engine import PROMPTS, load_tensors, start_engine

EXPERTS, WIDTH, LAYER = 6, 192, "model.layers.1.mlp.experts"
DOWN = f"{LAYER}.5.down_proj.weight"


def stacks(worker) -> dict[str, list]:
    """Plain lists: the answer must not depend on how executors send tensors."""
    layer = worker.model_runner.get_model().get_submodule(f"{LAYER}.routed_experts")
    return {
        name: (p.data.view(torch.uint8) if p.element_size() == 1 else p.data).tolist()
        for name, p in layer.named_parameters()
    }


def expected(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, list]:
    """One quantization of each local matrix, written out without vLLM."""
    found: dict[str, list] = {}
    for expert in range(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2):
        gate, up, down = (
            tensors[f"{LAYER}.{expert}.{leaf}_proj.weight"] for leaf in ("gate", "up", "down")
        )
        below, beside = (0, 0, 0, -WIDTH % 128), (0, -WIDTH % 128)
        matrices = {
            "w13": torch.cat([torch.nn.functional.pad(part, below) for part in (gate, up)]),
            "w2": torch.nn.functional.pad(down, beside),
        }
        for name, matrix in matrices.items():
            codes, scale_inv = quantize_block(matrix)
            found.setdefault(f"{name}_weight", []).append(codes.view(torch.uint8).tolist())
            found.setdefault(f"{name}_weight_scale_inv", []).append(scale_inv.tolist())
    return found


def main(root: Path) -> dict[str, object]:
    from vllm_fp8rl.refit import refit, worker

    a, b = (load_tensors(root / name) for name in "ab")
    engine = start_engine(
        root / "a",
        Recipe(kv_cache=KVCache(dtype="auto")),
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        worker_extension_cls=worker.EXTENSION,
    )
    llm = engine.llm
    before, first = llm.collective_rpc(pointers), engine.greedy(PROMPTS)
    found: dict[str, object] = {}
    # Small batches: some have no tensor of an expert that a rank holds.
    refit(llm, b.items(), expect_kv_scales=False, batch_bytes=1 << 16)
    found["codes"] = llm.collective_rpc(stacks) == [expected(b, rank) for rank in (0, 1)]
    found["tokens"] = second = engine.greedy(PROMPTS)
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
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))  # noqa: T201
