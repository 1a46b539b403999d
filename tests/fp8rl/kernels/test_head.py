"""The output projection in blocks of rows."""

from __future__ import annotations

import pytest
import torch

from fp8rl.kernels import head


@pytest.mark.parametrize("rows", [0, 3, 8, 21])
def test_every_product_has_one_number_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "ROWS", 8)
    sizes, mm = [], torch.mm

    def counted(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        sizes.append(len(x))
        return mm(x, *args, **options)

    monkeypatch.setattr(torch, "mm", counted)
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 16), torch.randn(40, 16)
    found = head.multiply(x, weight.t())
    assert sizes == [8] * -(-rows // 8)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=0, atol=1e-5)
