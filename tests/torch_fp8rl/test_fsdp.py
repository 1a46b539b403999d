"""FSDP2 over two processes, against one process with the micro-batches of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import run_ranks

SCRIPT = Path(__file__).with_name("fsdp_cases.py")
RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    "whole after forward": {"reshard": False, "keep": True, "first": "shard", "ragged": True},
    "checkpointed": {"checkpoint": True, "kind": "qwen2", "kv": True},
    "offloaded": {"offload": True, "first": "shard"},
    "experts": {"kind": "qwen3_moe", "keep": True},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("fsdp")
    run_ranks(SCRIPT, RANKS, out, json.dumps(CASES), timeout=240)
    return [torch.load(out / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_losses_weights_and_codes_are_those_of_one_process(ranks: list[dict], name: str):
    """To the bit: with two ranks no sum has another order, and halves are exact."""
    one = ranks[0][name]["one"]
    losses = torch.stack(one["losses"]).view(2, RANKS, -1)  # steps, ranks, micro-batches
    assert len(losses.flatten().unique()) == losses.numel()
    for rank, found in enumerate(ranks):
        got = found[name]["sharded"]
        assert torch.equal(torch.stack(got["losses"]), losses[:, rank].flatten())
        assert got["codes"].keys() == one["codes"].keys()
        for module, codes in got["codes"].items():
            assert torch.equal(codes, one["codes"][module]), module
        assert got["scales"] == one["scales"] and bool(one["scales"]) == ("kv" in CASES[name])
        assert got["state"].keys() == one["state"].keys()
        for parameter, tensor in got["state"].items():
            assert torch.equal(tensor, one["state"][parameter]), parameter


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("convert", "'model.layers.0.self_attn.k_proj.weight' is a DTensor while its layer runs"),
        ("shard", "'model.layers.0.self_attn.k_proj' is a FSDPLinear; FP8 training replaces"),
    ],
)
def test_a_linear_that_is_sharded_alone_is_refused(ranks: list[dict], first: str, words: str):
    assert all(words in found[first] for found in ranks)


def test_gradients_under_ddp_are_means(ranks: list[dict]):
    assert [found["ddp"] for found in ranks] == [[], []]
