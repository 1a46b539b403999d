"""What ``exact`` refuses of an engine over several tensor-parallel ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import require_served_ranks
from vllm_fp8rl.kernels import exact


def engine(kv_heads: int = 2, words: int = 128) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: kv_heads,
            get_vocab_size=lambda: words,
            get_hidden_size=lambda: 256,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1000),
    )


def test_parts_that_the_trainer_does_not_have() -> None:
    exact._check_ranks(engine())
    for given, message in (
        (engine(kv_heads=3), "multiple of 2 as num_key_value_heads, not 3"),
        (engine(words=100), "multiple of 64 as vocab_size, not 100"),
    ):
        with pytest.raises(UnsupportedError, match=f"{message}.* set tensor_parallel_size to 1"):
            exact._check_ranks(given)
    with pytest.raises(UnsupportedError, match="serves tensor_parallel_size 1 or 2, not 4"):
        require_served_ranks("tensor_parallel_size", 4)


def cut(x: torch.Tensor) -> torch.Tensor:
    """Float32 to bfloat16 without rounding to the nearest."""
    return (x.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()


def test_sums_that_are_not_rounded_as_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.randn(1000, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

    def gather(own: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((own, other[None, : own.shape[1]]), dim)

    def rounded_by(rounding: Any, rows: int) -> Any:
        def reduce(own: torch.Tensor) -> torch.Tensor:
            total = own.float() + other[: len(own)].float()
            return (rounding if len(own) >= rows else torch.Tensor.bfloat16)(total)

        return reduce

    monkeypatch.setattr(exact, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(exact, "tensor_model_parallel_all_gather", gather)
    monkeypatch.setattr(
        exact, "tensor_model_parallel_all_reduce", rounded_by(torch.Tensor.bfloat16, 1)
    )
    exact.check_sums(engine())
    for rows, named in ((1, 1), (100, 256), (1000, 1000)):
        monkeypatch.setattr(exact, "tensor_model_parallel_all_reduce", rounded_by(cut, rows))
        with pytest.raises(UnsupportedError, match=rf"bfloat16 \[{named}, 256\]; set disable_cust"):
            exact.check_sums(engine())
