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
from megatron_fp8rl.testing.launch import launch
from nemo_rl_ext.workers.logprobs import FusedLogprob, use_fused_logprobs
from support.processes import environment

RANKS = Path(__file__).with_name("logprob_ranks.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_a_vocabulary_agree_with_float64(ranks: int) -> None:
    assert launch(RANKS, ranks, timeout=120.0, env=environment()) == ["compared\n"] * ranks


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


def upstream(monkeypatch: pytest.MonkeyPatch, kind: type) -> Any:
    """Upstream's module with a class in its place, and nothing else."""
    names = ("nemo_rl", "nemo_rl.distributed", "nemo_rl.distributed.model_utils")
    modules: list[Any] = [ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    modules[0].distributed, modules[1].model_utils = modules[1:]
    modules[2].ChunkedDistributedLogprob = kind
    return modules[2]


def test_it_takes_the_place_of_upstreams_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = upstream(monkeypatch, Theirs)
    for _ in range(2):  # a second worker of the process finds ours
        use_fused_logprobs()
        assert module.ChunkedDistributedLogprob is FusedLogprob


def test_a_class_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = upstream(monkeypatch, Others)
    with pytest.raises(UnsupportedError, match="remove FP8RL_FUSED_LOGPROBS"):
        use_fused_logprobs()
    assert module.ChunkedDistributedLogprob is Others
