"""All experts of a module in one autograd function, against one function for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import BackendChoice, ReferenceBackend
from fp8rl.training.grouped import grouped_linear
from fp8rl.training.layout import RowLayout, gate_up_layout, plain_layout
from fp8rl.training.linear import Call, Fp8State
from megatron_fp8rl.layers.linear import fp8_linear
from support.megatron import Recording, fp8_states

OUT, IN = 96, 160
INTERLEAVED = RowLayout(("a", "b"), (16, 32), groups=2)  # another order than HF's, blocks parted


def _state(experts: int) -> Fp8State:
    return fp8_states(experts, plain_layout("x", OUT))[0]


def _weights(
    experts: int, fusion: str, frozen: Sequence[int] = (), dtype: torch.dtype = torch.bfloat16
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.nn.Parameter(
            torch.randn(OUT, IN, generator=generator).to(dtype), requires_grad=i not in frozen
        )
        for i in range(experts)
    ]
    buffer = torch.ones(experts, OUT, IN)
    for i, weight in enumerate(weights):
        if fusion == "ddp" or (fusion == "some" and i % 2):  # last expert first, as DDP has them
            weight.main_grad = buffer[experts - 1 - i]
            weight.grad_added_to_main_grad = False
        elif fusion == "apex":
            weight.main_grad = torch.ones(OUT, IN, dtype=dtype)
    return weights


def _each(
    x: torch.Tensor,
    splits: Sequence[int],
    weights: Sequence[torch.nn.Parameter],
    biases: Sequence[torch.Tensor] | None,
    states: Sequence[Fp8State],
    *,
    fusion: bool,
) -> torch.Tensor:
    outputs = []
    for i, run in enumerate(x.split(list(splits))):
        training = torch.is_grad_enabled() and weights[i].requires_grad
        call = Call(state=states[i], fusion=fusion, training=training)
        outputs.append(fp8_linear(run, weights[i], None if biases is None else biases[i], call))
    return torch.cat(outputs)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 140), min_size=1, max_size=4),
    st.sampled_from(["none", "ddp", "apex", "some"]),
    st.sampled_from([(), (1,), (0, 1, 2, 3)]),
    st.booleans(),
    st.sampled_from([plain_layout("x", OUT), INTERLEAVED, gate_up_layout(OUT // 2, apart=True)]),
    st.booleans(),
)
def test_results_are_those_of_each_expert_bit_for_bit(
    splits, fusion, frozen, bias, layout, x_needs_grad
):
    generator = torch.Generator().manual_seed(sum(splits))
    x = torch.randn(sum(splits), IN, generator=generator).bfloat16()
    grad = torch.randn(sum(splits), OUT, generator=generator).bfloat16()

    together, alone = fp8_states(len(splits), layout)

    def run(function: Callable, state: Any) -> list[torch.Tensor | None]:
        weights = _weights(len(splits), fusion, frozen)
        biases = [torch.ones(OUT).bfloat16().mul(i).requires_grad_() for i in range(len(splits))]
        leaf = x.clone().requires_grad_(x_needs_grad)
        y = function(
            leaf, splits, weights, biases if bias else None, state, fusion=fusion == "apex"
        )
        if y.requires_grad:
            y.backward(grad)
        results = [y.detach(), leaf.grad, *(b.grad for b in biases)]
        for weight in weights:
            added = getattr(weight, "grad_added_to_main_grad", None)
            # What autograd holds beside main_grad is of any content.
            own = weight.grad if added is None else torch.tensor(weight.grad is not None)
            results += [own, getattr(weight, "main_grad", None), torch.tensor(bool(added))]
        return results

    for got, expected in zip(run(grouped_linear, together), run(_each, alone), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_fusion_needs_main_grads_before_anything_is_added():
    weights = _weights(2, "apex")
    del weights[1].main_grad
    y = grouped_linear(torch.randn(9, IN).bfloat16(), (4, 5), weights, None, _state(2), fusion=True)
    with pytest.raises(UnsupportedError, match=r"'experts\.1\.x' has gradient_accumulation_fusion"):
        y.sum().backward()
    assert torch.equal(weights[0].main_grad, torch.ones(OUT, IN).bfloat16())


def test_a_backend_of_a_plugin_gets_all_experts_in_one_call():
    own = Recording()
    offered = {"recording": own, "reference": ReferenceBackend()}
    state, _ = fp8_states(3, plain_layout("x", OUT), BackendChoice(offered, ["fp32"]))
    weights = _weights(3, "ddp")
    x = torch.randn(30, IN).bfloat16().requires_grad_()
    grouped_linear(x, (10, 0, 20), weights, None, state, fusion=False).sum().backward()
    # The reference itself goes on to the products of each expert.
    grouped = [name for name in own.calls if name.startswith("grouped_")]
    assert grouped == ["grouped_fprop", "grouped_dgrad", "grouped_wgrad"]


class Padded(ReferenceBackend):
    name = "padded"

    def grouped_fprop(self, x, w, dtype):
        return torch.nn.functional.pad(super().grouped_fprop(x, w, dtype), (0, 0, 0, 98))


PADDED = BackendChoice({"padded": Padded()}, ["fp32"])


@pytest.mark.parametrize(
    ("splits", "backends", "message"),
    [
        ((30, 30), None, r"'experts\.x' got 30 tokens in"),
        ((30,), None, r"'experts\.x' got 30 tokens in"),
        ((10, 20), PADDED, "'padded' returned 128 rows for the 30 tokens"),
    ],
)
def test_refused(splits, backends, message):
    state, _ = fp8_states(2, plain_layout("x", OUT), backends)
    with pytest.raises(UnsupportedError, match=message):
        grouped_linear(torch.randn(30, IN), splits, _weights(2, "none"), None, state, fusion=False)
