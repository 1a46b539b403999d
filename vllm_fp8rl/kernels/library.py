"""How kernels of fp8rl become operations of torch, into which torch.compile does not look.

``torch.library.custom_op`` is not used: its calls dispatch to autograd, which rollouts do not need,
and take the host longer (``docs/measurements/start.md``). vLLM registers its own operations in the
same way (``direct_register_custom_op`` in ``vllm/utils/torch_utils.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fp8rl", "FRAGMENT")
"""Torch drops the operations of a library that no longer exists."""


def register(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function the operation ``torch.ops.fp8rl.NAME``.

    Args:
        name: of the operation.
        fake: function of the same arguments that returns empty tensors of the results' shapes,
            dtypes and strides.

    The operation serves all devices, must not change its arguments, and has no gradient.
    """

    def decorate(run: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(run, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp8rl::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.fp8rl, name)

    return decorate
