"""``benchmarks/trainer.py``: the batch it makes, and the time in which a GPU works.

The worker itself runs on a GPU alone; NeMo RL's batch is a dictionary here.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from support.benchmarks import imported


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("trainer", monkeypatch)


def test_spans_that_overlap_count_once(trainer: ModuleType) -> None:
    assert trainer.covered([]) == 0
    assert trainer.covered([(8.0, 9.0), (0.0, 4.0), (1.0, 2.0), (3.0, 5.0)]) == 6
    assert trainer.covered([(-5.0, -3.0)]) == 2


def test_a_batch_trains_on_what_was_sampled(
    trainer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("nemo_rl.distributed.batched_data_dict")
    module.BatchedDataDict = dict  # type: ignore[attr-defined]
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    policy = {"max_total_sequence_length": 12, "generation": {"max_new_tokens": 8}}
    batch = trainer.made_batch(range(100), policy, 6)
    assert batch["input_ids"].shape == (6, 12) and int(batch["input_ids"].max()) < 100
    assert torch.equal(batch["token_mask"].sum(1), torch.full((6,), 8.0))
    assert not batch["token_mask"][:, :4].any()
    assert torch.equal(batch["prev_logprobs"] != 0, batch["token_mask"] == 1)
    advantages = batch["advantages"]
    assert advantages.shape == (6, 12) and torch.equal(advantages[:, :1].expand(-1, 12), advantages)
    assert len(set(advantages[:, 0].tolist())) == 6  # equal ones would have no gradient
