"""NaN and infinity in weights that come through plain ``model.load_weights``.

A refit looks at a batch before it writes it. Plain loads come tensor by tensor, and on a GPU a look
at each would make the host wait each time: there it is queued, and read with the next step's other
conditions (:class:`~vllm_fp8rl.guard.RefitGuard`), once for all tensors. Without that an infinite
weight would be clamped to a code like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from fp8rl.errors import RefitError
from fp8rl.numerics import FP8_DTYPE, all_finite, start_finite_check

_WORTH_ONE_LAUNCH = 8
"""Tensors from which on one kernel for all costs the host less than one for each."""

_SCALES = ("_scale", "_scale_inv")  # their loaders look at the values


class PlainValues:
    """What is known of the values that plain loads brought, by HF name."""

    def __init__(self) -> None:
        self._bad: set[str] = set()
        self._queued: list[tuple[list[str], Callable[[], Sequence[bool]]]] = []

    def look(self, weights: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> bool:
        """Look at tensors that are about to be loaded; whether the next step has to ask.

        Raises:
            RefitError: one on the host is not finite; none has been loaded.
        """
        checked = [(n, t) for n, t in weights if not n.endswith(_SCALES) and t.dtype != FP8_DTYPE]
        on_gpu = [(name, tensor) for name, tensor in checked if tensor.is_cuda]
        on_host = [(name, tensor) for name, tensor in checked if not tensor.is_cuda]
        finite = all_finite([tensor for _, tensor in on_host])
        bad = [name for (name, _), good in zip(on_host, finite, strict=True) if not good]
        if bad and not any(parameter.is_meta for parameter in model.parameters()):
            raise RefitError(f"'{bad[0]}' has NaN or infinite values; it was not loaded.")
        # In vLLM's layerwise reload an error would leave half a model behind: the next step raises.
        if on_host and (bad or self._bad or self._queued):
            self._queued.append(([name for name, _ in on_host], lambda: finite))
        # What is read later must be read into flags now: the sender may reuse the memory.
        together = [(n, t) for n, t in on_gpu if t.is_contiguous()]
        if len(together) >= _WORTH_ONE_LAUNCH:
            names = [name for name, _ in together]
            self._queued.append((names, start_finite_check([tensor for _, tensor in together])))
            on_gpu = [(n, t) for n, t in on_gpu if not t.is_contiguous()]
        for name, tensor in on_gpu:
            if tensor.numel():
                self._queued.append(([name], _finite_flag(tensor)))
        return bool(self._bad or bad or together or on_gpu)

    def require_finite(self) -> None:
        """Wait for what was queued.

        Raises:
            RefitError: something was not finite, and has not come again since.
        """
        queued, self._queued = self._queued, []
        for names, answers in queued:
            for name, good in zip(names, answers(), strict=True):
                if good:
                    self._bad.discard(name)
                else:
                    self._bad.add(name)
        if self._bad:
            raise RefitError(
                f"'{min(self._bad)}' came with NaN or infinite values through load_weights "
                f"({len(self._bad)} such tensors); load them again, or refit the engine."
            )

    def forget(self) -> None:
        """A complete refit has replaced everything."""
        self._bad.clear()
        self._queued.clear()


def _finite_flag(tensor: torch.Tensor) -> Callable[[], list[bool]]:
    # A NaN anywhere makes both extremes NaN.
    flag = torch.isfinite(torch.stack(torch.aminmax(tensor.detach())).float()).all()
    return lambda: [bool(flag)]
