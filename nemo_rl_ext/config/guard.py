"""`GuardConfig`: the settings of the mismatch guard, ``loss_fn.fp8rl_guard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fp8rl.errors import RecipeError
from fp8rl.reading import explain

Above = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]


class GuardConfig(BaseModel):
    """``loss_fn.fp8rl_guard``; bounds are on ``fp8rl/capped_prob_error``, 1 is perfect.

    No bound fits all models, so these hold for the first ten steps, above those of a small
    pretrained model in FP8 end to end, and ``times_start`` lowers all of them by these steps. In 11
    healthy runs of such a model no step was 1.3 times as far from 1 as the median of its first ten
    (``docs/measurements/expect.md``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tighten_above: Above = 1.3
    """Above this, sequences outside ``geometric`` are rejected."""
    skip_above: Above = 2.0
    """Above this, the step is left out."""
    release_below: Above = 1.25
    """A step below this counts towards going back to normal."""
    release_after: Annotated[int, Field(ge=1)] = 5
    """Steps in a row below ``release_below``."""
    fallback_after: Annotated[int, Field(ge=1)] = 3
    """Steps left out in a row, those that rejection has emptied included, after which the run
    ends."""
    fallback: Literal["stop"] = "stop"
    """The run ends, and its message names the keys by which the last checkpoint goes on in BF16."""
    times_start: Above | None = 3.0
    """After ten steps that were trained on ``tighten_above`` is at most so many times as far from 1
    as their median, ``skip_above`` 3.3 times as far as that and ``release_below`` 5/6; None: bounds
    stay."""
    geometric: Above = 1.05
    """While tight, a sequence stays if its geometric mean ratio is within this factor of 1."""

    @model_validator(mode="after")
    def _ordered(self) -> GuardConfig:
        if not self.release_below <= self.tighten_above <= self.skip_above:
            raise ValueError("release_below <= tighten_above <= skip_above must hold")
        return self

    @classmethod
    def from_dict(cls, data: Any, *, where: str) -> GuardConfig:
        """Validate a plain mapping.

        Raises:
            RecipeError: with the full path of every bad key.
        """
        if not isinstance(data, Mapping):
            raise RecipeError(f"'{where}' must be a mapping, not {type(data).__name__}.")
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise RecipeError(f"Bad guard: {explain(error, where, cls)}") from None
