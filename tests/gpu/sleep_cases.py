"""Sleep and wake-up of a captured engine; run by test_vllm_sleep.py in a process of its own.

vLLM's allocator serves one engine a process, and which model runner it takes is read at import.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError
from support.gpu_engine import QUICK, make_checkpoints, refit_tensors, start_engine
from vllm_fp8rl.kv.scales import kv_scale_state
from vllm_fp8rl.refit import drop_requests, refit

STARTED = time.perf_counter()
FINAL_NORM = "model.norm.weight"


class Case:
    """An engine with the weights of ``a`` at the start of each test."""

    def __init__(self, root: Path, recipe: Recipe) -> None:
        self.paths = make_checkpoints(root)
        self.recipe = recipe
        self.engine = start_engine(self.paths["a"], self.recipe, enable_sleep_mode=True, **QUICK)
        self.llm = self.engine.llm
        self.tensors = {n: refit_tensors(p, self.recipe) for n, p in self.paths.items()}
        self.tokens = {}
        for name in "ba":
            self.refit(name)
            self.tokens[name] = self.engine.greedy()
        assert self.tokens["a"] != self.tokens["b"]

    def refit(self, name: str) -> None:
        refit(self.llm, self.tensors[name].items(), expect_kv_scales=True)

    def expect(self, name: str) -> None:
        assert self.engine.greedy() == self.tokens[name]
        layers = self.engine.model.model.layers
        for (index, role), value in kv_scale_state(self.engine.model).items():
            attention = layers[index].self_attn.attn
            for held in (f"_{role}_scale", f"{role}_scale"):
                assert getattr(attention, held).item() == value, (index, held)


def level_1_without_a_refit(case: Case) -> None:
    case.llm.sleep(level=1)
    case.llm.wake_up()
    case.expect("a")


def level_1_in_the_order_of_nemo_rl(case: Case) -> None:
    for name in "ba":
        case.llm.sleep(level=1)
        case.llm.wake_up(tags=["weights"])
        case.refit(name)
        case.llm.wake_up(tags=["kv_cache"])
        case.expect(name)


def level_2_refuses_until_every_parameter_came(case: Case) -> None:
    case.llm.sleep(level=2)
    with pytest.raises(RefitError, match="weights sleep; wake them first"):
        case.refit("a")
    case.llm.wake_up()
    with pytest.raises(RefitError, match=r"level-2 sleep discarded '.*'.*refit"):
        case.engine.greedy()
    drop_requests(case.llm)
    weights = {n: t for n, t in case.tensors["b"].items() if not n.endswith("_scale")}
    norm = weights.pop(FINAL_NORM)
    case.engine.model.load_weights(weights.items())
    with pytest.raises(RefitError, match=rf"discarded '{FINAL_NORM}'.*\(1 such"):
        case.engine.greedy()
    drop_requests(case.llm)
    kept = kv_scale_state(case.engine.model)  # those of ``a``: the host keeps them
    case.engine.model.load_weights([(FINAL_NORM, norm)])
    case.engine.greedy()
    assert kv_scale_state(case.engine.model) == kept
    case.refit("b")
    case.expect("b")


def level_2_with_plain_loads_in_either_order(case: Case) -> None:
    for tags in (["weights"], None):
        case.llm.sleep(level=2)
        case.llm.wake_up(tags=tags)
        for item in case.tensors["a"].items():  # one tensor a call, as TRL pushes them
            case.engine.model.load_weights([item])
        if tags is not None:
            case.llm.wake_up(tags=["kv_cache"])
        case.llm.reset_prefix_cache()
        case.expect("a")


def memory_does_not_grow(case: Case) -> None:
    free = []
    for cycle in range(6):
        case.llm.sleep(level=1 + cycle % 2)
        case.llm.wake_up(tags=["weights"])
        case.refit("ab"[cycle % 2])
        case.llm.wake_up(tags=["kv_cache"])
        case.expect("ab"[cycle % 2])
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    say("free MiB after each cycle:", *(round(f / 2**20) for f in free))
    # What grows does so in every cycle; what other processes take comes and goes.
    assert min(a - b for a, b in itertools.pairwise(free[1:])) <= 8 << 20, free


CASES: list[Callable[[Case], None]] = [
    level_1_without_a_refit,
    level_1_in_the_order_of_nemo_rl,
    level_2_refuses_until_every_parameter_came,
    level_2_with_plain_loads_in_either_order,
    memory_does_not_grow,
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), Recipe(exact="exact" in sys.argv))
        worker = case.llm.llm_engine.model_executor.driver_worker.worker
        say("runner:", type(worker.model_runner).__module__)
        for test in CASES:
            case.refit("a")
            case.expect("a")
            test(case)
            say("passed", test.__name__)
        case.llm.llm_engine.engine_core.shutdown()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + f" ({time.perf_counter() - STARTED:.0f} s)\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
