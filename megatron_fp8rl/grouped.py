"""The experts of one rank as one grouped FP8 linear: each multiplies its own run of tokens.

The operands of a weight gradient have groups along tokens, which begin with each expert's first
token; quantization pads the ragged last group of each with zeros, so that token dispatchers need
not pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.linear import Call, Fp8Module, Fp8State, check_weight, fp8_linear


@dataclass(frozen=True)
class Fp8GroupedState:
    """What a converted grouped module has beside its parameters."""

    name: str
    """Global HF module name without the experts' numbers."""
    experts: tuple[Fp8State, ...]
    """One for each local expert, in the order of the weights."""


class Fp8Grouped(Fp8Module):
    """An :class:`Fp8Module` with one weight for each local expert."""

    fp8_state: Fp8GroupedState

    def drop_codes(self) -> None:
        for expert in self.fp8_state.experts:
            expert.codes.drop()


def grouped_linear(
    x: torch.Tensor,
    splits: Sequence[int],
    weights: Sequence[torch.nn.Parameter],
    biases: Sequence[torch.Tensor] | None,
    state: Fp8GroupedState,
    *,
    fusion: bool,
) -> torch.Tensor:
    """``y_i = x_i @ weight_i.T + bias_i`` over runs of tokens; all products are FP8.

    Args:
        x: ``[tokens, in]``, the tokens of expert 0 first.
        splits: number of tokens of each expert, 0 allowed.
        weights: ``[out, in]`` each.
        biases: ``[out]`` each, or None.
        state: of the module.
        fusion: gradients are added to ``weight.main_grad``.

    Returns:
        ``[tokens, out]`` in the dtype of ``x``.

    Raises:
        UnsupportedError: the splits do not add up, or a weight is not served.
    """
    if len(splits) != len(weights) or sum(splits) != len(x):
        raise UnsupportedError(
            f"'{state.name}' got {len(x)} tokens in {len(splits)} runs of {sum(splits)} for "
            f"{len(weights)} experts; give one run for each expert."
        )
    runs = []
    for i, run in enumerate(x.split(list(splits))):
        expert, weight = state.experts[i], weights[i]
        check_weight(expert.name, weight)
        training = torch.is_grad_enabled() and weight.requires_grad
        call = Call(state=expert, fusion=fusion, training=training)
        runs.append(fp8_linear(run, weight, biases[i] if biases is not None else None, call))
    return torch.cat(runs)
