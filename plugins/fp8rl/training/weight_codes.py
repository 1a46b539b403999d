"""FP8 codes of a module's weights: made at each use, or kept within :class:`KeepingCodes`.

An optimizer of megatron-core (plain or distributed) writes the new weights without a change of
``weight._version``, at the same address, and *after* torch's step hook has run. So the hook only
advances :class:`WeightEpoch`, and the next forward, which comes after any parameter gather,
quantizes. Other writes leave no trace that could be asked for (``torch.distributed.broadcast`` and
most of its kind, ``parameter.data``, numpy), and to compare weights costs as much as to quantize
them. So codes are kept only within a context whose caller promises that there are none.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8rl.numerics import Addresses, Operand, Quantized, quantize_weight, quantize_weights
from fp8rl.recipe import ScaleFormat
from fp8rl.training.layout import RowLayout

logger = logging.getLogger(__name__)

_Key = tuple[tuple[int, int, int], ...]
"""Address, version and epoch of each weight."""
_OPEN = None
"""Key in the dict of an open :class:`KeepingCodes`; its other keys are :class:`WeightCodes`."""


class WeightEpoch:
    """Count the moments at which weights may have changed without a trace on the tensor, and hold
    the codes that are kept between two of them.

    A hook on ``torch.optim`` advances it after every optimizer step; the hook is removed with the
    last owner of this object. A replayed CUDA graph runs no hook, so nothing is kept any more once
    a step has been captured in one.
    """

    def __init__(self) -> None:
        self.value = 0
        self.kept: dict[WeightCodes | None, Any] = {}
        """Codes of the :class:`KeepingCodes` that was opened last."""
        self._captured = False
        ref = weakref.ref(self)

        def after_step(*args: Any, **kwargs: Any) -> None:
            epoch = ref()
            if epoch is None:
                return
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                if epoch.keep:
                    logger.warning(
                        "fp8rl: an optimizer step is captured in a CUDA graph, whose replays leave "
                        "no trace on the weights, so their FP8 codes are not kept any longer; "
                        "switch optimizer_cuda_graph off to keep them."
                    )
                epoch._captured = True
            epoch.turn()

        hook = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, hook.remove)

    @property
    def keep(self) -> bool:
        """Whether codes are kept now."""
        return _OPEN in self.kept and not self._captured

    def __reduce__(self) -> tuple[type[WeightEpoch], tuple[()]]:
        """Give a copy a hook of its own, and no codes."""
        return WeightEpoch, ()

    def turn(self) -> None:
        """Mark every weight quantized so far as stale."""
        self.value += 1


class KeepingCodes(io.IOBase):
    """Keep weight codes while a ``with`` of this object is open, and free them at its end.

    Python raises KeyboardInterrupt wherever a function that is written in Python begins, also one
    that is to undo something. So the end is one call of C, the reason for the base class: its
    ``__exit__`` calls ``close``, which is here the ``clear`` of the dict with the codes.

    Args:
        epochs: of the weights; one that keeps codes already goes on with those.
    """

    def __init__(self, epochs: Iterable[WeightEpoch]) -> None:
        self._epochs = [epoch for epoch in epochs if not epoch.keep]
        self._kept: dict[WeightCodes | None, Any] = {}
        self.close = self._kept.clear  # type: ignore[method-assign]

    def __enter__(self) -> None:  # type: ignore[override]
        for epoch in self._epochs:
            epoch.kept = self._kept
        self._kept[_OPEN] = True  # last: until here an interrupt leaves nothing open


class WeightCodes:
    """The codes of the weights of one module, in HF row order, or in Megatron's where the blocks
    are the same.

    If one weight of several has changed, all codes are made anew in one launch.

    Args:
        layout: row order of each weight; blocks lie on the HF order.
        scale_format: format of the scales of the 128x128 blocks.
        epoch: shared by all weights of a conversion; it also says whether codes are kept.
        stacked: hold the codes of all weights as one stack ``[experts, ..]``; without it several
            weights are the rows of one matrix.
        dtype: dtype to which weights are rounded before they are quantized; None: their own.
    """

    def __init__(
        self,
        layout: RowLayout,
        scale_format: ScaleFormat,
        epoch: WeightEpoch,
        *,
        stacked: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.layout = layout
        self.scale_format = scale_format
        self._epoch = epoch
        self._stacked = stacked
        self._dtype = dtype
        self._addresses = Addresses()

    def drop(self) -> None:
        """Free the codes; the next call makes new ones."""
        self._epoch.kept.pop(self, None)

    def rowwise(self, *weights: torch.Tensor, training: bool = False) -> Quantized:
        """Return the codes of the weights as they are now, for fprop.

        Where the epoch keeps codes, a change is seen if it bumps ``_version`` (any in-place
        operation on the parameter, ``load_state_dict``), moves the storage, or comes from an
        optimizer step; ``keeping_codes`` of a conversion says which is not.

        Args:
            weights: ``[layout.rows, K]`` each, in Megatron's row order; rows behind these have no
                codes. Several without ``stacked`` have ``layout.rows`` rows together.
            training: whether :meth:`columnwise` will be called too, so that one read makes both.

        Returns:
            codes ``[layout.rows, K']``, float32 scale_inv ``[ceil(rows/128), ceil(K/128)]``, with
            ``stacked`` behind a dimension of experts; with ``layout.apart`` the rows include the
            padding. K' is as in :func:`fp8rl.numerics.quantize_weight`. A non-finite weight gives a
            NaN code.
        """
        return self._codes(weights, 0, both=training)

    def columnwise(self, *weights: torch.Tensor) -> Quantized:
        """Return the same codes and scales, the last two dimensions transposed, for dgrad."""
        return self._codes(weights, 1)

    def _codes(
        self, weights: Sequence[torch.Tensor], side: int, *, both: bool = False
    ) -> Quantized:
        """Return one side, which may be kept; ``both`` makes the other too if that stays."""
        keep, key, codes = self._epoch.keep, None, Operand(None, None)
        if keep:
            key = self.key(weights)
            of, kept = self._epoch.kept.get(self, (None, codes))
            codes = kept if of == key else codes
        found = codes[side]
        if found is None:
            other = keep and both and codes[1 - side] is None
            made = self._make(weights, rowwise=side == 0 or other, columnwise=side == 1 or other)
            if keep:
                rowwise, columnwise = (
                    made.rowwise or codes.rowwise,
                    made.columnwise or codes.columnwise,
                )
                self._epoch.kept[self] = key, Operand(rowwise, columnwise)
            found = made[side]
            assert found is not None
        return found

    def fresh(self, *weights: torch.Tensor) -> Quantized:
        """Return the codes ``[rows, K]`` of one matrix as it is now, and keep nothing.

        Callers outside of a forward may see weights that a distributed optimizer has not gathered
        yet; those codes must not stay.
        """
        (rows,) = self._matrices(weights)
        made, _ = quantize_weight(rows, self.scale_format, columnwise=False)
        assert made is not None
        return Quantized(made.codes[:, : rows.shape[1]].contiguous(), made.scale_inv)

    def _make(
        self, weights: Sequence[torch.Tensor], *, rowwise: bool = False, columnwise: bool = False
    ) -> Operand:
        rows = self._matrices(weights)
        if self._stacked:
            return quantize_weights(
                rows,
                self.scale_format,
                rowwise=rowwise,
                columnwise=columnwise,
                known=self._addresses,
            )
        return quantize_weight(rows[0], self.scale_format, rowwise=rowwise, columnwise=columnwise)

    def key(self, weights: Sequence[torch.Tensor]) -> _Key:
        """Return what tells these weights from what they become later."""
        epoch = self._epoch.value
        return tuple((self.address(weight), weight._version, epoch) for weight in weights)

    def address(self, weight: torch.Tensor) -> int:
        """Return a number that changes when a weight gets other memory."""
        return weight.data_ptr()

    def _matrices(self, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the matrices to quantize: one for each expert, else one alone."""
        if self._dtype is not None and weights[0].dtype != self._dtype:
            weights = [weight.detach().to(self._dtype) for weight in weights]
        if len(weights) > 1 and not self._stacked:
            weights = [torch.cat([weight.detach() for weight in weights])]
        # Experts are many: a view of each would take the host as long as all that follows.
        if self.layout.in_place and len(weights[0]) == self.layout.rows:
            return weights
        rows = (weight.detach()[: self.layout.rows] for weight in weights)
        return [each if self.layout.in_place else self.layout.to_hf(each) for each in rows]
