"""FP8 codes of one weight: made lazily, kept until the weight changes.

An optimizer of megatron-core (plain or distributed) writes the new weights without bumping
``weight._version``, at the same address, and *after* torch's step hook has run. So the hook only
turns :class:`WeightEpoch`, and the next forward, which comes after any parameter gather, quantizes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8rl.numerics import Quantized, quantize_block
from fp8rl.recipe import ScaleFormat
from megatron_fp8rl.layout import RowLayout


class WeightEpoch:
    """Counts the moments at which weights may have changed without a trace on the tensor.

    Owns a hook on ``torch.optim`` that turns it after every optimizer step; the hook goes with
    :meth:`close`, or with the last owner of this object.
    """

    def __init__(self) -> None:
        self.value = 0
        ref = weakref.ref(self)

        def after_step(*args: Any, **kwargs: Any) -> None:
            epoch = ref()
            if epoch is not None:
                epoch.turn()

        hook = register_optimizer_step_post_hook(after_step)
        self._remove_hook = weakref.finalize(self, hook.remove)

    def turn(self) -> None:
        """Every weight quantized so far counts as stale."""
        self.value += 1

    def close(self) -> None:
        """Remove the optimizer hook; may be called again."""
        self._remove_hook()


class WeightCodes:
    """The codes of one weight in HF row order, or in Megatron's where the blocks are the same.

    Args:
        layout: row order; blocks lie on the HF order.
        scale_format: of the 128x128 blocks.
        epoch: shared by all weights of a conversion.
    """

    def __init__(self, layout: RowLayout, scale_format: ScaleFormat, epoch: WeightEpoch) -> None:
        self.layout = layout
        self.scale_format = scale_format
        self._epoch = epoch
        self._key: tuple[int, int, int] | None = None
        self._codes: Quantized | None = None

    def get(self, weight: torch.Tensor) -> Quantized:
        """Codes of ``weight`` as it is now.

        A change is seen if it bumps ``_version`` (any in-place operation on the parameter,
        ``load_state_dict``), moves the storage, or comes from an optimizer step. Writing through
        ``weight.data`` leaves no trace: call ``Conversion.invalidate()`` after it.

        Args:
            weight: ``[layout.rows, K]`` in Megatron's row order.

        Returns:
            codes ``[layout.rows, K]``, float32 scale_inv ``[ceil(rows/128), ceil(K/128)]``. A
            non-finite weight gives a NaN code.
        """
        key = (weight.data_ptr(), weight._version, self._epoch.value)
        if self._codes is None or key != self._key:
            self._codes = self._quantize(weight.detach())
            self._key = key
        return self._codes

    def drop(self) -> None:
        """Free the codes; the next :meth:`get` makes them anew."""
        self._key = self._codes = None

    def _quantize(self, weight: torch.Tensor) -> Quantized:
        rows = weight if self.layout.in_place else self.layout.to_hf(weight)
        return quantize_block(mark_inf(rows), scale_format=self.scale_format)


def mark_inf(x: torch.Tensor) -> torch.Tensor:
    """``x`` with every infinity turned into NaN.

    E4M3 has no infinity: quantization would clamp one to 448 and hide an overflow. NaN has a code,
    and stays NaN in every product that it enters.
    """
    nan = float("nan")
    return x.nan_to_num(nan, nan, nan)
