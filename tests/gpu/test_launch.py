"""Launches by what was compiled before, against the same in torch.

Needs a CUDA GPU; with ``TRITON_INTERPRET=1`` and triton installed it runs on the CPU instead, where
nothing is compiled.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from support.triton_device import DEVICE, INTERPRETED

triton = importlib.import_module("triton")
tl = triton.language
Launcher = importlib.import_module("fp8rl.numerics.triton.launch").Launcher

COUNT = 300


@triton.jit(do_not_specialize=["count"])
def _kernel(x_ptr, out_ptr, count, stride, NEGATIVE: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x_ptr + at * stride, at < count, other=0).to(tl.float32)
    tl.store(out_ptr + at, -value if NEGATIVE else value, at < count)


def test_what_triton_compiles_apart_is_kept_apart():
    launch = Launcher(_kernel, num_warps=4)
    source = torch.randn(COUNT * 16 + 8, device=DEVICE)
    cases = itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        (0, 1),  # elements in front: an aligned address, and one that is not
        (1, 3, 16),
        (COUNT, 16, 1),
        (True, False),
        (128, 256),
    )
    for dtype, first, stride, count, negative, width in [*cases] * 2:
        x = source.to(dtype)[first:]
        out = torch.zeros(COUNT, device=DEVICE)
        launch(-(-count // width), (x, out, count, stride), (negative, width))
        expected = x[: count * stride : stride].float() * (-1 if negative else 1)
        assert torch.equal(out[:count], expected)
        assert not out[count:].any()


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_triton_binds_the_first_launch_of_its_kind_alone(monkeypatch):
    launch = Launcher(_kernel, num_warps=4)
    runs = []
    run = triton.runtime.jit.JITFunction.run
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda *a, **k: runs.append(a) or run(*a, **k)
    )
    x = torch.randn(COUNT, device=DEVICE)
    for count in (200, 300, 100):
        out = torch.zeros(COUNT, device=DEVICE)
        launch(-(-count // 128), (x, out, count, 1), (False, 128))
        assert torch.equal(out[:count], x[:count])
    assert len(runs) == 1


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_codes_are_seen_as_bytes():
    launch = Launcher(_kernel, num_warps=4)
    x = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        out = torch.zeros(256, device=DEVICE)
        launch(2, (x.view(torch.float8_e4m3fn), out, 256, 1), (False, 128))
        assert torch.equal(out, x.float())
