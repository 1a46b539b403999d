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

from fp8rl.numerics import Operand, Quantized, quantize_weight
from fp8rl.recipe import ScaleFormat
from megatron_fp8rl.layout import RowLayout


class WeightEpoch:
    """Counts the moments at which weights may have changed without a trace on the tensor.

    Owns a hook on ``torch.optim`` that turns it after every optimizer step, and that goes with the
    last owner of this object.
    """

    def __init__(self) -> None:
        self.value = 0
        ref = weakref.ref(self)

        def after_step(*args: Any, **kwargs: Any) -> None:
            epoch = ref()
            if epoch is not None:
                epoch.turn()

        hook = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, hook.remove)

    def turn(self) -> None:
        """Every weight quantized so far counts as stale."""
        self.value += 1


class WeightCodes:
    """The codes of one weight in HF row order, or in Megatron's where the blocks are the same.

    Args:
        layout: row order; blocks lie on the HF order.
        scale_format: of the 128x128 blocks.
        epoch: shared by all weights of a conversion.
        keep: keep the codes until the weight is known to have changed. By default a GPU, where they
            take 2 bytes a parameter and little time, makes them at each use, and a CPU, where they
            take long, compares the weight with the one they were made of; so neither can use
            stale ones.
    """

    def __init__(
        self,
        layout: RowLayout,
        scale_format: ScaleFormat,
        epoch: WeightEpoch,
        keep: bool | None = None,
    ) -> None:
        self.layout = layout
        self.scale_format = scale_format
        self._epoch = epoch
        self._keep = keep
        self._key: tuple[int, int, int] | None = None
        self._made_of: torch.Tensor | None = None
        self._codes = Operand(None, None)

    def get(self, weight: torch.Tensor) -> Quantized:
        """See :meth:`rowwise`."""
        return self.rowwise(weight)

    def rowwise(self, weight: torch.Tensor, training: bool = False) -> Quantized:
        """Codes of ``weight`` as it is now, for fprop.

        With ``keep`` a change is seen if it bumps ``_version`` (any in-place operation on the
        parameter, ``load_state_dict``), moves the storage, or comes from an optimizer step. Writing
        through ``weight.data`` leaves no trace: call ``Conversion.invalidate()`` after it.

        Args:
            weight: ``[layout.rows, K]`` in Megatron's row order.
            training: :meth:`columnwise` will be called too, so make both in one read.

        Returns:
            codes ``[layout.rows, K]``, float32 scale_inv ``[ceil(rows/128), ceil(K/128)]``. A
            non-finite weight gives a NaN code.
        """
        if not self._keeps(weight):
            return _present(self._make(weight, rowwise=True).rowwise)
        self._forget_if_changed(weight)
        if self._codes.rowwise is None:
            both = training and self._codes.columnwise is None
            made = self._make(weight, rowwise=True, columnwise=both)
            self._codes = Operand(made.rowwise, made.columnwise or self._codes.columnwise)
        return _present(self._codes.rowwise)

    def columnwise(self, weight: torch.Tensor) -> Quantized:
        """The same codes transposed, ``[K, layout.rows]``, and their scales, for dgrad."""
        if not self._keeps(weight):
            return _present(self._make(weight, columnwise=True).columnwise)
        self._forget_if_changed(weight)
        rowwise, columnwise = self._codes
        if columnwise is None:
            if rowwise is not None and not weight.is_cuda:
                return Quantized(rowwise.codes.t(), rowwise.scale_inv.t())
            columnwise = self._make(weight, columnwise=True).columnwise
            self._codes = Operand(rowwise, columnwise)
        return _present(columnwise)

    def fresh(self, weight: torch.Tensor) -> Quantized:
        """Codes of ``weight`` as it is now, of which nothing is kept.

        For a look from outside: what a distributed optimizer has not gathered yet must not stay.
        """
        return _present(self._make(weight, rowwise=True).rowwise)

    def drop(self) -> None:
        """Free the codes; the next call makes them anew."""
        self._key = self._made_of = None
        self._codes = Operand(None, None)

    def _forget_if_changed(self, weight: torch.Tensor) -> None:
        if self._keep is None:
            if self._made_of is None or not torch.equal(self._made_of, weight):
                self.drop()
                self._made_of = weight.detach().clone()
            return
        key = (weight.data_ptr(), weight._version, self._epoch.value)
        if key != self._key:
            self._key, self._codes = key, Operand(None, None)

    def _keeps(self, weight: torch.Tensor) -> bool:
        return not weight.is_cuda if self._keep is None else self._keep

    def _make(
        self, weight: torch.Tensor, *, rowwise: bool = False, columnwise: bool = False
    ) -> Operand:
        rows = weight.detach()
        if not self.layout.in_place:
            rows = self.layout.to_hf(rows)
        return quantize_weight(rows, self.scale_format, rowwise=rowwise, columnwise=columnwise)


def _present(side: Quantized | None) -> Quantized:
    assert side is not None
    return side
