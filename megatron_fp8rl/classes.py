"""Which FP8 class takes the place of which upstream class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fp8rl import compat
from megatron_fp8rl.linear import FP8_CLASSES


def fp8_class(upstream: type) -> type | None:
    """The FP8 class of an exact upstream class, or None where there is none."""
    return _all().get(upstream)


def upstream_class(fp8: type) -> type | None:
    """The inverse of :func:`fp8_class`."""
    return next((upstream for upstream, ours in _all().items() if ours is fp8), None)


def check_module(path: str, module: Any) -> None:
    """Refuse a module of a served class with options that are not.

    Raises:
        UnsupportedError: naming ``path`` and the option.
    """
    if type(module) not in FP8_CLASSES:
        from megatron_fp8rl import te_classes

        te_classes.check_module(path, module)


def _all() -> Mapping[type, type]:
    if not compat.has_transformer_engine():
        return FP8_CLASSES
    from megatron_fp8rl.te_classes import TE_CLASSES  # needs TransformerEngine

    return {**FP8_CLASSES, **TE_CLASSES}
