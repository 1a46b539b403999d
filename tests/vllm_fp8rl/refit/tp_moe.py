"""Run by test_tensor_parallel.py in a process of its own: engines over two ranks, in turn.

python tp_moe.py FOLDER    # with the checkpoints "a" and "b" of each kind
Prints one JSON object on its last line: what each kind has found, or how it failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import pytest
from tp_refit import error_of, pointers

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.engine import keep_process_groups, load_tensors, start_engine
from support.mla import ALL, ON_A_CPU
from support.processes import fork_engines
from support.teacher_forced import vllm_logprobs
from support.towers import TEXT_ONLY
from vllm_fp8rl.refit import refit

PLAIN = Recipe(kv_cache=KVCache(dtype="auto"))
KINDS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "experts": (PLAIN, {}),
    "halves": (PLAIN, {}),
    "latent": (ALL, ON_A_CPU),
    "delta": (PLAIN, TEXT_ONLY),
}
"""Recipe, and arguments of an engine. Each rank has half of the experts, or a half of each."""


def two_ranks(kind: str, folder: Path) -> dict[str, Any]:
    """Logprobs with ``a``, ``b`` and ``a`` again; the error of a refit that lacks a tensor."""
    recipe, options = KINDS[kind]
    whole = {"enable_expert_parallel": kind != "halves"}
    a, b = (load_tensors(folder / name) for name in "ab")
    engine = start_engine(folder / "a", recipe, tensor_parallel_size=2, **whole, **options)
    before, logprobs = engine.llm.collective_rpc(pointers), [vllm_logprobs(engine).tolist()]
    for tensors in (b, a):  # small batches: some have no tensor of an expert of a rank
        refit(engine.llm, tensors.items(), expect_kv_scales=False, batch_bytes=1 << 16)
        logprobs.append(vllm_logprobs(engine).tolist())
    lacking = [item for item in b.items() if ".1.mlp.experts.5.down_proj" not in item[0]]
    found = {
        "logprobs": logprobs,
        "error": error_of(lambda: refit(engine.llm, lacking, expect_kv_scales=False)),
        "in place": engine.llm.collective_rpc(pointers) == before,
    }
    engine.llm.llm_engine.engine_core.shutdown()
    return found


def one_rank(kind: str, folder: Path) -> dict[str, Any]:
    """Logprobs of an engine in this process that has loaded ``b``."""
    recipe, options = KINDS[kind]
    engine = start_engine(folder / "b", recipe, **options)
    keep_process_groups(engine)
    return {"one": vllm_logprobs(engine).tolist()}


def main(root: Path) -> dict[str, dict[str, Any]]:
    """What each kind gives, or how it failed: the others run all the same."""
    made = [kind for kind in KINDS if (root / kind).is_dir()]
    found: dict[str, dict[str, Any]] = {kind: {} for kind in made}
    for run in (two_ranks, one_rank):  # processes are forked first
        for kind in made:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    if kind == "delta":
                        from support.gated_delta_net import compute_in_float32

                        compute_in_float32(patch)  # before the ranks are forked
                    found[kind] |= run(kind, root / kind)
            except Exception:
                found[kind]["failed"] = traceback.format_exc()
    return found


if __name__ == "__main__":
    fork_engines()
    print(json.dumps(main(Path(sys.argv[1]))))  # noqa: T201
