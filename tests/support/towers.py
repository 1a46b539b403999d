"""Vision towers of engines that take text alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

TEXT_ONLY: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
"""Arguments of an engine that reads no images, so that it needs no processor."""


def keep_towers(patch: pytest.MonkeyPatch) -> None:
    """Let engines that read no images hold their tower nevertheless; vLLM leaves it out."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    patch.setattr(SupportsMultiModal, "_mark_tower_model", lambda *_, **__: nullcontext())
