"""Fused log-probabilities beside upstream's own class; on a CPU the kernel has a stand-in."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from nemo_rl_ext.workers.logprobs import UPSTREAM, ExactLogprob, FusedLogprob
from support.logprob_kernels import kernels
from support.megatron import one_process
from support.sources import source

CLASS = UPSTREAM.name.partition(".")[0]
WORDS, SHAPE = 1000, (2, 9)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    file = source("NEMO_RL_SRC").joinpath(*UPSTREAM.module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    helper = "_compute_distributed_log_softmax"
    wanted = (CLASS, helper, f"{helper}_with_grad")
    nodes: list[ast.stmt] = [n for n in tree.body if getattr(n, "name", None) in wanted]
    assert len(nodes) == len(wanted)
    found: dict[str, Any] = {"torch": torch, "Any": Any}
    exec(compile(ast.Module(nodes, []), str(file), "exec"), found)
    with pytest.MonkeyPatch.context() as patch, one_process():
        if DEVICE == "cpu":
            patch.setitem(sys.modules, "fp8rl.numerics.triton.logprobs", kernels())
        yield found[CLASS]


def outside(logits: torch.Tensor, target: torch.Tensor) -> None:
    target[0, 0], target[1, 3] = -100, WORDS + 7


def masked(logits: torch.Tensor, target: torch.Tensor) -> None:
    logits[0, 1, ::2] = float("-inf")


def nan(logits: torch.Tensor, target: torch.Tensor) -> None:
    logits[0, 1, 7] = float("nan")


@pytest.mark.parametrize("change", [None, outside, masked, nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FusedLogprob, ExactLogprob])
def test_ours_are_upstreams(theirs: Any, kind: Any, change: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(*SHAPE, WORDS, generator=generator)).to(DEVICE, dtype)
    target = torch.randint(WORDS, SHAPE, generator=generator).to(DEVICE)
    grad = torch.randn(SHAPE, generator=generator).to(DEVICE)
    if change is not None:
        change(logits, target)
    results = []
    for function in (theirs, kind):
        x = logits.clone().requires_grad_(True)
        found = function.apply(x, target, 0, WORDS, 4, torch.distributed.group.WORLD, False)
        found.backward(grad)
        results.append((found, x.grad))
    (expected, gradient), (ours, own) = results
    torch.testing.assert_close(ours, expected, rtol=0, atol=4e-6, equal_nan=True)
    unit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(own, gradient, rtol=unit, atol=4e-6, equal_nan=True)


def test_upstream_looks_its_class_up_when_it_is_called() -> None:
    """A name that a module has imported would not follow the replacement."""
    root = source("NEMO_RL_SRC") / "nemo_rl"
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert CLASS not in {alias.name for alias in node.names}, file
