"""The share of equal log-probabilities, and the error where it is below 1 on policy."""

from __future__ import annotations

import json
import math
import shlex
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.recipe import ImportanceSampling
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.driver.batch_correction import BatchCorrection
from nemo_rl_ext.driver.exactness import equal_logprobs
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches import batch_correction

MODEL = "my-model"


def data(*differ: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Two rows, of which columns 2 to 4 of the first count: a first token has no logprob."""
    ours = -torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) - 0.5
    theirs = ours.clone()
    for place in differ:
        theirs[place] = math.nextafter(theirs[place].item(), -9.0) - 1e-7
    tokens = torch.zeros(2, 6)
    tokens[:, [0, 2, 3, 4]] = 1
    return {
        "token_mask": tokens,
        "sample_mask": torch.tensor([1.0, 0.0]),
        "prev_logprobs": ours,
        "generation_logprobs": theirs,
    }


@pytest.mark.parametrize(
    ("differ", "share"),
    [(((0, 3),), 2 / 3), (((0, 0), (0, 1), (0, 5), (1, 3)), 1.0)],
    ids=["one", "none that counts"],
)
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_share_and_the_error(
    differ: Any, share: float, on_policy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = equal_logprobs(data(*differ), MODEL, Recipe(exact=True), on_policy=on_policy)
    assert found == {"fp8rl/equal_logprobs": pytest.approx(share)}
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    if on_policy and share < 1:
        assert "1 of 3 tokens" in errors[0] and errors[0].endswith(": fp8rl exact my-model")
    else:
        assert not errors


def test_the_error_names_the_recipe_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    given = {"exact": True, "kv_cache": {"dtype": "int8_per_token_head"}}
    equal_logprobs(data((0, 3)), MODEL, Recipe.from_dict(given), on_policy=True)
    command = shlex.split(caplog.messages[-1].rpartition(": fp8rl exact ")[2])
    assert command[:2] == [MODEL, "--recipe"] and json.loads(command[2]) == given
    empty = data() | {"sample_mask": torch.zeros(2)}
    assert equal_logprobs(empty, MODEL, Recipe(exact=True), on_policy=True) == {}


@pytest.mark.parametrize(
    ("driver", "queues"),
    [("grpo", True), ("grpo", False), ("single_controller", True), (None, False)],
)
def test_each_step_has_it_before_upstream_masks_what_differs(
    driver: str | None, queues: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def masking(train_data: Any, rewards: Any, seq_logprob_error_threshold: Any) -> Any:
        train_data["sample_mask"].zero_()
        return {"num_masked_seqs": 1, "mean_seq_mult_prob_error": 1.0}

    module: Any = ModuleType("nemo_rl.algorithms.grpo")
    name = "compute_and_apply_seq_logprob_error_masking"
    setattr(module, name, masking)
    masking.__qualname__ = name  # as a function of a module
    finder, in_pieces = PatchFinder(), driver == "single_controller"
    if driver is not None:
        finder.run.plan = RunPlan(
            driver=driver,
            recipe=Recipe(exact=True),
            sections=("loss_fn",),
            model=MODEL,
            queues_batches=queues,
        )
    # As the loss makes it.
    finder.run.correction = BatchCorrection(ImportanceSampling(), in_pieces=in_pieces)
    batch_correction.apply(module, finder)
    metrics = getattr(module, name)(data((0, 3)), torch.ones(2), 1.0)
    step = finder.run.correction.end_step()[1]
    assert ("fp8rl/equal_logprobs" in step) == in_pieces
    share = None if driver is None else pytest.approx(2 / 3)
    assert metrics.get("fp8rl/equal_logprobs") == share
    assert ("exact does not hold" in caplog.text) == (driver is not None and not queues)
