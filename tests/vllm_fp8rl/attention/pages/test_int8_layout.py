"""The order of bytes in pages of an INT8 cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.attention.pages.int8_layout import int8_pages

KV_HEADS, SIZE, PAGE, PAGES = 2, 64, 16, 5


def empty() -> torch.Tensor:
    """Return a cache of vLLM 0.25.1, each byte -1."""
    return torch.full((PAGES, 2, PAGE, KV_HEADS, SIZE + 4), -1, dtype=torch.int8)


def test_views_cover_each_byte_of_a_page_once() -> None:
    cache = empty()
    for view in int8_pages(cache, KV_HEADS, SIZE):
        view.view(torch.uint8).add_(1)
    assert (cache == 0).all()


def test_pages_in_another_order_of_bytes_are_refused() -> None:
    by_head = torch.zeros(PAGES, 2, KV_HEADS, PAGE, SIZE + 4, dtype=torch.int8).transpose(2, 3)
    int8_pages(by_head, KV_HEADS, SIZE)  # another order within a page does not matter
    with pytest.raises(UnsupportedError, match=r"in one piece.*kv_cache\.dtype to auto"):
        int8_pages(empty()[:, :, :, :, :SIZE], KV_HEADS, SIZE)
    apart = torch.zeros(PAGES, 2, PAGE, KV_HEADS, SIZE + 8, dtype=torch.int8)[..., : SIZE + 4]
    with pytest.raises(UnsupportedError, match="in one piece"):
        int8_pages(apart, KV_HEADS, SIZE)
