"""Weight codes and CUDA graphs; changed weights: ``megatron_fp8rl/test_{conversion,resume}.py``."""

from __future__ import annotations

import torch

from fp8rl.numerics import quantize_block
from fp8rl.training.layout import plain_layout
from fp8rl.training.weight_codes import KeepingCodes, WeightCodes, WeightEpoch
from support.numeric import same_codes


def test_nothing_is_kept_once_a_cuda_graph_has_captured_a_step(monkeypatch, caplog):
    """Its replays run no hook. A mock says that a graph is captured: this is no GPU."""
    weight = torch.nn.Parameter(torch.randn(130, 70, dtype=torch.bfloat16))
    epoch = WeightEpoch()
    codes = WeightCodes(plain_layout("o_proj", 130), "fp32", epoch)
    with KeepingCodes([epoch]):
        assert codes.rowwise(weight) is codes.rowwise(weight)
        weight.grad = torch.ones_like(weight)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            torch.optim.SGD([weight], lr=1.0).step()
        assert "optimizer_cuda_graph" in caplog.text
    for _ in range(2):
        with KeepingCodes([epoch]):
            assert not epoch.keep
            assert same_codes(codes.rowwise(weight), quantize_block(weight.detach()))
            weight.data.neg_()  # as a replay does
            assert same_codes(codes.rowwise(weight), quantize_block(weight.detach()))
