"""NaN and infinity in weights, as they come or as the engine would store them.

3.4e38 in float32 is infinite in BF16, and 7e4 is infinite in FP16: :func:`largest_value` is the
limit of a model. Without a check an infinite weight would be clamped to a code like any other.

A refit checks a batch before it writes it. Plain ``model.load_weights`` may come tensor by tensor,
and on a GPU each check would make the host wait. There the check is queued, and its answer is read
once for all tensors, with the other conditions of the next step
(:class:`~vllm_fp8rl.engine.guard.RefitGuard`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from fp8rl.errors import RefitError
from fp8rl.numerics import all_finite, start_finite_check
from vllm_fp8rl.storage.block_grid import SOURCE_DTYPES

_WORTH_ONE_LAUNCH = 8
"""Tensors from which on one kernel for all costs the host less than one for each."""

_SCALES = ("_scale", "_scale_inv")  # their loaders check the values

_LARGEST_QUANTIZED = torch.finfo(torch.float32).max / (1 + 1 / 16)
"""Rounding to a code may add a sixteenth; the code times its scale must be finite in float32, in
which kernels multiply."""


def largest_value(model: torch.nn.Module) -> float:
    """Return the largest magnitude that a weight may have in every parameter of a model.

    Those in BF16, FP16 or FP32 keep it as it is; FP8 ones as codes and scales.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()} & set(SOURCE_DTYPES)
    return min([_LARGEST_QUANTIZED, *(torch.finfo(dtype).max for dtype in dtypes)])


def not_finite(name: str, tensor: torch.Tensor, limit: float) -> str:
    """Return the beginning of a sentence that says what is wrong with a tensor's values."""
    if all_finite([tensor])[0]:
        return f"'{name}' has values beyond {limit:.6g}, the largest that the engine can hold"
    return f"'{name}' has NaN or infinite values"


class PlainValues:
    """What is known of plain loads, by HF name: bad values, and tensors that must come again."""

    def __init__(self) -> None:
        self.owed: set[str] | None = set()
        """HF names of the tensors that must come again before the model may run, after a plain load
        that broke off; None: all of them."""
        self._limit: float | None = None
        self._bad: set[str] = set()
        self._queued: list[tuple[list[str], Callable[[], Sequence[bool]]]] = []

    def limit(self, model: torch.nn.Module) -> float:
        """Return the :func:`largest_value` of the model, computed once."""
        if self._limit is None:
            self._limit = largest_value(model)
        return self._limit

    def look(self, weights: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> bool:
        """Check tensors before they are loaded; return whether :meth:`require_finite` must follow.

        One on the host that is not finite is a RefitError at once.
        """
        checked = [(n, t) for n, t in weights if not n.endswith(_SCALES) and t.is_floating_point()]
        limit = self.limit(model)
        on_gpu = [(name, tensor) for name, tensor in checked if tensor.is_cuda]
        on_host = [(name, tensor) for name, tensor in checked if not tensor.is_cuda]
        finite = all_finite([tensor for _, tensor in on_host], limit) if on_host else []
        bad = [item for item, good in zip(on_host, finite, strict=True) if not good]
        if bad:
            raise RefitError(f"{not_finite(*bad[0], limit)}; it was not loaded.")
        if on_host and (self._bad or self._queued):  # they may replace bad ones
            self._queued.append(([name for name, _ in on_host], lambda: finite))
        # The kernels that read the tensors start now: the sender may reuse the memory later.
        together = [(n, t) for n, t in on_gpu if t.is_contiguous()]
        if len(together) >= _WORTH_ONE_LAUNCH:
            names = [name for name, _ in together]
            started = start_finite_check([tensor for _, tensor in together], limit)
            self._queued.append((names, started))
            on_gpu = [(n, t) for n, t in on_gpu if not t.is_contiguous()]
        for name, tensor in on_gpu:
            if tensor.numel():
                self._queued.append(([name], _finite_flag(tensor, limit)))
        return bool(self._bad or together or on_gpu)

    def require_finite(self) -> None:
        """Wait for the checks; RefitError for a bad tensor that has not come again since."""
        queued, self._queued = self._queued, []
        for names, answers in queued:
            for name, good in zip(names, answers(), strict=True):
                if good:
                    self._bad.discard(name)
                else:
                    self._bad.add(name)
        if self._bad:
            raise RefitError(
                f"'{min(self._bad)}' came with NaN or infinite values through load_weights, or "
                "with values too large for the engine "
                f"({len(self._bad)} such tensors); load them again, or refit the engine."
            )

    def forget(self) -> None:
        """Forget everything, after a complete refit has replaced all weights."""
        self.owed = set()
        self._bad.clear()
        self._queued.clear()


def _finite_flag(tensor: torch.Tensor, limit: float) -> Callable[[], list[bool]]:
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.bfloat16)  # torch has no norm of FP8 codes
    # A NaN anywhere makes the norm NaN, which is not smaller than anything.
    limit = min(limit, torch.finfo(tensor.dtype).max)
    largest = torch.linalg.vector_norm(tensor.detach(), math.inf)
    return lambda: [float(largest) <= limit]
