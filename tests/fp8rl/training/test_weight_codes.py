"""Weight codes are made once and never go stale."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import quantize_block
from fp8rl.training.layout import plain_layout
from fp8rl.training.weight_codes import KeepingCodes, WeightCodes, WeightEpoch


@pytest.fixture
def epoch():
    found = WeightEpoch()
    with KeepingCodes([found]):
        yield found


def _weight(rows: int = 130, columns: int = 70) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16))


def _codes(epoch: WeightEpoch, rows: int = 130) -> WeightCodes:
    return WeightCodes(plain_layout("o_proj", rows), "fp32", epoch)


def _same(codes, weight) -> bool:
    expected = quantize_block(weight.detach())
    return torch.equal(codes.codes.view(torch.uint8), expected.codes.view(torch.uint8))


@pytest.mark.parametrize("how", ["copy_", "new storage", "optimizer"])
def test_every_noticed_way_to_change_a_weight(epoch, how):
    module = torch.nn.Linear(70, 130, bias=False, dtype=torch.bfloat16)
    codes = _codes(epoch)
    before = codes.rowwise(module.weight)
    new = torch.randn_like(module.weight)
    if how == "copy_":
        with torch.no_grad():
            module.weight.copy_(new)
    elif how == "new storage":
        module.weight.data = new
    else:
        module.weight.grad = new
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    after = codes.rowwise(module.weight)
    assert after is not before
    assert _same(after, module.weight)
    assert not _same(before, module.weight)


def test_nothing_is_kept_once_a_cuda_graph_has_captured_a_step(monkeypatch, caplog):
    """Its replays run no hook. A mock says that a graph is captured: this is no GPU."""
    epoch, weight = WeightEpoch(), _weight()
    codes = _codes(epoch)
    with KeepingCodes([epoch]):
        codes.rowwise(weight)
        weight.grad = torch.ones_like(weight)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            torch.optim.SGD([weight], lr=1.0).step()
        assert "optimizer_cuda_graph" in caplog.text
        assert not epoch.keep
        assert _same(codes.rowwise(weight), weight)
    with KeepingCodes([epoch]):
        assert not epoch.keep
        assert _same(codes.rowwise(weight), weight)
        weight.data.neg_()  # as a replay does


def test_codes_that_are_not_kept_are_made_from_the_weight_as_it_is():
    weight = _weight()
    codes = _codes(WeightEpoch())
    first = codes.rowwise(weight, training=True)
    assert codes.rowwise(weight) is not first
    weight.data.copy_(torch.randn_like(weight))  # leaves no trace on the tensor
    assert _same(codes.rowwise(weight), weight)
    turned = codes.columnwise(weight)
    assert torch.equal(
        turned.codes.t().contiguous().view(torch.uint8),
        codes.rowwise(weight).codes.view(torch.uint8),
    )
