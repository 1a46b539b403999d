"""Fused log-probabilities beside upstream's own class; on a CPU the kernel has a stand-in."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import SimpleNamespace
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


def test_all_log_probabilities_of_a_megatron_worker_are_exact(theirs: Any) -> None:
    """Upstream's functions with chunks and without filters, and no other class within reach."""
    root = source("NEMO_RL_SRC") / "nemo_rl"
    functions = {
        "distributed/model_utils.py": (
            "_get_tokens_on_this_cp_rank",
            "from_parallel_logits_to_logprobs",
            "from_parallel_logits_to_logprobs_packed_sequences",
            "get_next_token_logprobs_from_logits",
        ),
        "algorithms/logits_sampling_utils.py": (
            "_need_top_k_filtering",
            "_need_top_p_filtering",
            "need_top_k_or_top_p_filtering",
        ),
    }
    nodes = ast.parse("from __future__ import annotations").body
    for file, names in functions.items():
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        nodes += [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(nodes) == 1 + sum(map(len, functions.values()))
    theirs_: dict[str, Any] = {"torch": torch, CLASS: ExactLogprob}
    exec(compile(ast.Module(nodes, []), "upstream", "exec"), theirs_)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(*SHAPE, WORDS, generator=generator)).to(DEVICE, torch.bfloat16)
    ids = torch.randint(WORDS, SHAPE, generator=generator).to(DEVICE)
    chosen = ids[:, 1:, None]
    expected = logits[:, :-1].double().log_softmax(-1).gather(-1, chosen)[..., 0].float()
    group = torch.distributed.group.WORLD
    sampling = SimpleNamespace(top_k=None, top_p=1.0)
    common = {"chunk_size": 4, "sampling_params": sampling}
    part: dict[str, Any] = {"vocab_start_index": 0, "vocab_end_index": WORDS, **common}
    rows, length = SHAPE
    packed = logits.reshape(1, rows * length, WORDS)
    starts = torch.arange(rows + 1) * length
    pack = theirs_["from_parallel_logits_to_logprobs_packed_sequences"]
    found = {
        "get_logprobs": theirs_["from_parallel_logits_to_logprobs"](
            logits, ids, tp_group=group, inference_only=True, **part
        ),
        "get_logprobs, packed": pack(
            packed, ids.view(1, -1), starts, length, group=group, inference_only=True, **part
        ),
        "loss": theirs_["get_next_token_logprobs_from_logits"](
            ids, logits, vocab_parallel_rank=0, vocab_parallel_group=group, **common
        ),
        "loss, packed and fused": pack(
            packed,
            ids.roll(-1, 1).view(1, -1),
            starts,
            length,
            group=group,
            target_is_pre_rolled=True,
            **part,
        ),
    }
    for name, ours in found.items():
        torch.testing.assert_close(ours, expected, rtol=0, atol=4e-6, msg=name)
        assert torch.equal(ours, found["loss"]), name


def test_upstream_looks_its_class_up_when_it_is_called() -> None:
    """A name that a module has imported would not follow the replacement."""
    root = source("NEMO_RL_SRC") / "nemo_rl"
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert CLASS not in {alias.name for alias in node.names}, file
