"""Arguments of the wrong kind at every public function: one clear error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fp8rl import PluginManager
from fp8rl.errors import BatchError, Fp8RLError, RecipeError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext import (
    GRPOConfig,
    GRPOLoss,
    correct,
    group_relative_advantages,
    hooks,
    merge_metrics,
    reject,
)
from nemo_rl_ext.grpo.importance_sampling import Correction

PLUGINS = PluginManager(discover=False)
PLUGINS.register(hooks)
GOOD = torch.full((2, 3), -1.0)
MASK = torch.ones(2, 3, dtype=torch.bool)
GROUPS = torch.zeros(3, dtype=torch.int64)
HARD = ImportanceSampling(
    level="sequence",
    self_normalize=True,
    rejection=Rejection(level="geometric", high=2.0),
    token_veto=0.1,
)
NAN, INF = math.nan, math.inf
GSPO = GRPOConfig(loss_mode="gspo", loss_aggregation="sequence", kl_coefficient=0.1)

HOSTILE: dict[str, Any] = {
    "list": GOOD.tolist(),
    "None": None,
    "number": -1.0,
    "int": GOOD.int(),
    "complex": GOOD.cfloat(),
    "one dimension": GOOD[0],
    "short": GOOD[:, :2],
    "NaN": GOOD * math.nan,
    "infinite": GOOD * math.inf,
    "meta": GOOD.to("meta"),
    "sparse": GOOD.to_sparse(),
    "quantized": torch.quantize_per_tensor(GOOD, 0.1, 0, torch.quint8),
    "a tuple of tensors": (GOOD, MASK),
}


def with_at(value: float, row: int, token: int) -> torch.Tensor:
    changed = GOOD.clone()
    changed[row, token] = value
    return changed


def weighted(weight: float = 1.0) -> Correction:
    """Weights of one, but for row 1, token 1."""
    weights = torch.ones(2, 3)
    weights[1, 1] = weight
    return Correction(weights, MASK, {})


def with_defaults(function: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        return function(**{**defaults, **given})

    return call


LOGPROBS = dict.fromkeys(("rollout_logprobs", "trainer_logprobs"), GOOD)
BATCH: dict[str, Any] = {
    **dict.fromkeys(("current_logprobs", "old_logprobs", "rollout_logprobs"), GOOD),
    "advantages": torch.ones(2),
    "mask": MASK,
    "reference_logprobs": GOOD,
}
PPO_LOSS = GRPOLoss(GRPOConfig(), ImportanceSampling(), PLUGINS)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "correct": (
        with_defaults(correct, **LOGPROBS, mask=MASK, config=HARD),
        (*LOGPROBS, "mask", "config"),
    ),
    "reject": (
        with_defaults(reject, log_ratio=GOOD, mask=MASK, rejection=HARD.rejection, token_veto=0.1),
        ("log_ratio", "mask", "rejection", "token_veto"),
    ),
    "loss": (with_defaults(PPO_LOSS, **BATCH), (*BATCH, "correction", "normalizer")),
    "gspo": (with_defaults(GRPOLoss(GSPO, ImportanceSampling(), PLUGINS), **BATCH), ()),
    "hard": (with_defaults(GRPOLoss(GRPOConfig(), HARD, PLUGINS), **BATCH), ()),
    "normalizer": (PPO_LOSS.normalizer, ("mask",)),
    "advantages": (
        with_defaults(group_relative_advantages, rewards=torch.ones(3), group_ids=GROUPS),
        ("rewards", "group_ids", "eps"),
    ),
    "constructor": (
        with_defaults(GRPOLoss, config=GRPOConfig(), importance_sampling=HARD, plugins=PLUGINS),
        ("config", "importance_sampling"),
    ),
    "merge_metrics": (merge_metrics, ("parts",)),
    "settings": (GRPOConfig, ()),
}


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, (_, names) in FUNCTIONS.items() for a in names]
)
def test_no_argument_ends_in_a_traceback(function: str, argument: str) -> None:
    """Naively a list is an AttributeError, and integers are taken for log-probabilities."""
    call, _ = FUNCTIONS[function]
    refused = 0
    for what, value in HOSTILE.items():
        try:
            call(**{argument: value})
        except Fp8RLError as error:
            assert str(error).endswith("."), error
            refused += 1
        except Exception as error:
            pytest.fail(f"{argument} as {what}: {type(error).__name__}: {error}")
    assert refused >= 5


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("advantages", {"rewards": [1.0, 0.0, 1.0]}, "rewards must be a tensor, not list; make"),
    ("advantages", {"rewards": torch.ones(3).cfloat()}, "rewards must be real numbers"),
    ("advantages", {"eps": -1.0}, "eps is -1.0; give a number of at least 0"),
    ("advantages", {"group_ids": GROUPS[:2]}, r"rewards \(3,\) and group_ids \(2,\)"),
    ("advantages", {"rewards": GOOD, "group_ids": MASK.long()}, r"must both be \[B\]"),
    ("advantages", {"group_ids": torch.zeros(3)}, "group_ids must be integers, not torch.fl"),
    ("advantages", {"rewards": torch.tensor([0.0, NAN, 0.0])}, r"rewards\[1\] is nan"),
    ("correct", {"trainer_logprobs": torch.zeros(2, 4)}, r"trainer_logprobs \(2, 4\)"),
    ("correct", dict.fromkeys((*LOGPROBS, "mask"), GOOD[0]), r"\[B, T\]"),
    ("correct", {"mask": torch.zeros(2, 3)}, "mask counts no token"),
    ("correct", {"rollout_logprobs": with_at(NAN, 1, 2)}, "row 1, token 2"),
    ("correct", dict.fromkeys(LOGPROBS, with_at(-INF, 1, 2)), "row 1, token 2"),
    ("correct", {"trainer_logprobs": MASK}, "trainer_logprobs must be floating-point numbers"),
    ("correct", {"mask": MASK / 2}, "mask .* holds other numbers than 0 and 1; give a bool"),
    ("correct", {"mask": MASK.to("meta")}, "mask must be a dense tensor with values"),
    ("correct", {"config": {"mode": "off"}}, r"ImportanceSampling\), not dict\."),
    ("reject", {"rejection": {"high": 2.0}}, r"Rejection\), not dict\."),
    ("reject", {"mask": MASK.float()}, "mask bool, not torch.float32 and torch.float32"),
    ("reject", {"log_ratio": GOOD * math.nan}, "log_ratio is NaN at row 0, token 0"),
    ("reject", {"token_veto": 0.0}, "token_veto is 0.0; give a ratio above 0"),
    ("constructor", {"config": {}}, r"config of GRPOLoss must be of GRPOConfig, not dict\."),
    ("constructor", {"importance_sampling": {}}, r"must be of ImportanceSampling, not dict\."),
    ("loss", {"old_logprobs": GOOD[:, :2]}, r"old_logprobs \(2, 2\)"),
    ("loss", {"advantages": torch.zeros(3)}, r"advantages \(3,\) must be \[B\] or \[B, T\]"),
    ("loss", {"advantages": torch.tensor([0.0, NAN])}, "is NaN at row 1, token 0"),
    ("loss", {"advantages": with_at(-INF, 0, 2)}, "advantages is -inf at row 0, token 2, .*1 such"),
    ("loss", {"advantages": torch.tensor([0.0, 1e300]).double()}, "is inf at row 1, token 0"),
    ("loss", {"correction": weighted(INF)}, "importance weight is inf at row 1, token 1"),
    ("loss", {"correction": weighted().rows(slice(0, 1))}, r"correction \(1, 3\)"),
    ("loss", {"correction": (GOOD, MASK)}, "what GRPOLoss.correct returns, not tuple"),
    ("loss", {"current_logprobs": with_at(NAN, 1, 0)}, "current_logprobs - old_logprobs is Na"),
    ("loss", {"reference_logprobs": with_at(NAN, 1, 0)}, "- current_logprobs is NaN"),
    ("gspo", {"reference_logprobs": None}, r"kl_coefficient is 0\.1, which needs"),
    ("gspo", {"reference_logprobs": GOOD.int()}, "reference_logprobs must be floating-point"),
    *(("loss", {"normalizer": n}, "normalizer is .* for 6 kept") for n in (0, NAN, INF)),
    ("loss", {"normalizer": "4"}, "normalizer must be one number, not str"),
    ("hard", {"normalizer": 4}, "self_normalize is a mean over the whole batch"),
    ("merge_metrics", {"parts": [{}]}, r"parts\[0\] holds no 'loss_tokens'"),
    (
        "merge_metrics",
        {"parts": [{"loss_tokens": 1.0, "ess": 1.0}, {"loss_tokens": 1.0}]},
        r"parts\[1\] and parts\[0\] differ in ess; correct the whole batch once",
    ),
    ("settings", {"clip_lo": 0.2}, "clip_lo"),
    ("settings", {"clip_high": INF}, "clip_high"),
    ("settings", {"loss_mode": "gspo_token"}, "'gspo_token' clips whole .*loss_aggregation"),
    ("settings", {"loss_mode": "cispo", "dual_clip": 3.0}, "'cispo' .*remove dual_clip"),
]


@pytest.mark.parametrize(("function", "given", "message"), REFUSED)
def test_the_error_names_the_argument(function: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises((BatchError, RecipeError, ValidationError), match=message):
        FUNCTIONS[function][0](**given)


def test_masks_of_ones_and_zeros_may_have_any_dtype() -> None:
    expected = correct(GOOD, GOOD - 0.1, MASK, HARD)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        assert torch.equal(
            correct(GOOD, GOOD - 0.1, MASK.to(dtype), HARD).weights, expected.weights
        )
