"""Fused log-probabilities in the place of upstream's: ranks, gradients, and the class's place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.workers.logprobs import ExactLogprob, FusedLogprob, fuse_logprobs
from support.processes import run_ranks

RANKS = Path(__file__).with_name("logprob_ranks.py")


def test_ranks_that_share_a_vocabulary_agree_with_float64() -> None:
    assert run_ranks(RANKS, 2, timeout=120.0) == ["compared\n"] * 2


class Theirs(torch.autograd.Function):
    """The signature of upstream's class, which ``tests/contract`` compares with its source."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> torch.Tensor:
        raise NotImplementedError


class Others(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vocab_parallel_logits: torch.Tensor, labels: Any) -> torch.Tensor:
        raise NotImplementedError


def upstream(monkeypatch: pytest.MonkeyPatch, kind: type, wanted: str | None) -> Any:
    """Upstream's module with a class in its place, and nothing else."""
    monkeypatch.delenv("FP8RL_FUSED_LOGPROBS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("FP8RL_FUSED_LOGPROBS", wanted)
    names = ("nemo_rl", "nemo_rl.distributed", "nemo_rl.distributed.model_utils")
    modules: list[Any] = [ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    modules[0].distributed, modules[1].model_utils = modules[1:]
    modules[2].ChunkedDistributedLogprob = kind
    return modules[2]


CHUNKED = {"logprob_chunk_size": 256}


@pytest.mark.parametrize(
    ("kind", "wanted", "exact", "policy", "stands"),
    [
        (Theirs, None, False, CHUNKED, FusedLogprob),
        (Theirs, None, True, CHUNKED, ExactLogprob),
        (Theirs, "0", False, CHUNKED, Theirs),
        (Theirs, None, False, {}, Theirs),  # log-probabilities are not computed in chunks
        (Others, None, False, CHUNKED, Others),
    ],
)
def test_which_class_stands_in_the_place_of_upstreams(
    kind: type, wanted: str | None, exact: bool, policy: Any, stands: type, monkeypatch: Any
) -> None:
    module = upstream(monkeypatch, kind, wanted)
    for _ in range(2):  # a second worker of the process finds ours
        fuse_logprobs(policy, exact=exact)
        assert module.ChunkedDistributedLogprob is stands


@pytest.mark.parametrize(
    ("kind", "policy", "exact", "remedy"),
    [
        (Others, CHUNKED, False, "check out that commit, or remove FP8RL_FUSED_LOGPROBS"),
        (Theirs, {}, False, "set policy.logprob_chunk_size"),
        (Others, CHUNKED, True, "or set exact to false in the fp8rl block"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type, policy: dict[str, Any], exact: bool, remedy: str
) -> None:
    module = upstream(monkeypatch, kind, None if exact else "1")
    with pytest.raises(UnsupportedError, match=remedy):
        fuse_logprobs(policy, exact=exact)
    assert module.ChunkedDistributedLogprob is kind
