"""`Fp8DTensorTraining`: what fp8rl adds to NeMo RL's DTensor policy workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8rl.kv_scales import ROLES, scale_name
from nemo_rl_ext.names import LOGGER
from nemo_rl_ext.workers.kept_codes import KeptCodes
from nemo_rl_ext.workers.refit import NOT_SENT
from nemo_rl_ext.workers.training import Fp8Trainer, Scales, keeps_codes
from torch_fp8rl import convert
from torch_fp8rl.kv import KVCacheInTraining, QKVObserver
from torch_fp8rl.layers import Fp8Linear

logger = logging.getLogger(LOGGER)


class Fp8DTensorTraining(Fp8Trainer):
    """Mixin for NeMo RL's DTensor policy workers; it stands before upstream's class in the bases.

    The model is converted when upstream's constructor has ended: sharded, with weights, optimizer
    and checkpoint, all of which stay as they are. The reference policy is run by the same layers,
    into which upstream copies its weights. A model without optimizer is a frozen teacher with a
    copy of the policy's section: it stays in BF16.

    Upstream refuses KV scales here, and sends what ``model.state_dict()`` holds: the weights, which
    it gathers and rounds to BF16. While it describes or sends them the state dict holds the scales
    too, which are powers of two and so the same in BF16.
    """

    dp_size: int
    rank: int

    def __init__(self, config: Any, *args: Any, init_optimizer: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, init_optimizer=init_optimizer, **kwargs)
        plan = self._plan
        recipe = plan.of_trainer
        if not init_optimizer or recipe is None:
            return
        # NeMo RL shows what its own logger says; one table is enough.
        report = logger.info if self.rank == 0 else None
        conversion = convert(self.model, recipe, report=report)
        if keeps_codes() and conversion.modules:
            linears = [m for m in self.model.modules() if isinstance(m, Fp8Linear)]
            # Of sharded weights too the codes are whole.
            weights = sum(linear.weight.numel() for linear in linears)
            self._kept_codes = KeptCodes(conversion.keeping_codes, weights)
        if plan.kv_scales == "trainer":
            self._qkv_observer = self._observe(self.model)
        if plan.rounded_as != "auto":
            self._kv_cache = KVCacheInTraining(self.model, plan.rounded_as)

    def prepare_refit_info(self, **options: Any) -> Any:
        """Upstream's names, shapes and dtypes of a refit, KV scales among them."""
        with self._scales_in_state_dict({}):
            return super().prepare_refit_info(**options)  # type: ignore[misc]

    def _observe(self, model: torch.nn.Module) -> QKVObserver:
        return QKVObserver(model)

    def _data_parallel_ranks(self) -> int:
        return self.dp_size

    def _send(self, upstream: Callable[..., Any], scales: Scales | None) -> Any:
        with self._scales_in_state_dict(scales or {}):
            return upstream()

    @contextmanager
    def _scales_in_state_dict(self, scales: Scales) -> Iterator[None]:
        """Let the state dict hold KV scales; NOT_SENT for those that the driver does not have."""
        if self._plan.kv_scales != "trainer" or self._qkv_observer is None:
            yield
            return
        names = [scale_name(n, role) for n in self._qkv_observer.layers for role in ROLES]

        def add(model: torch.nn.Module, state: dict[str, Any], *_: Any) -> None:
            device = next(model.parameters()).device
            for name in names:
                state[name] = torch.tensor([scales.get(name, NOT_SENT)], device=device)

        handle = self.model.register_state_dict_post_hook(add)
        try:
            yield
        finally:
            handle.remove()
