"""verl's FSDP2 worker in FP8 on both sides, as a module that verl imports by name.

With this folder on PYTHONPATH of all of Ray's workers, and the recipe in FP8RL_RECIPE, add to a
command of verl 0.9::

    actor_rollout_ref.model.external_lib=verl_fp8 \\
    actor_rollout_ref.actor.strategy=fsdp2 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8rl \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8_e4m3 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_fp8.Extension
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError
from torch_fp8rl import convert, export_hf
from torch_fp8rl.kv import KVCacheInTraining, QKVObserver
from vllm_fp8rl.refit import RefitMixin, RefitSession

RECIPE = Recipe.from_env() or Recipe()
FIRST_TEXT = "Question: what is 12 + 34? Answer: 12 + 34 = 46, because 2 + 4 = 6 and 1 + 3 = 4."
"""Seen before the first rollout, which needs KV scales too; take a text of your task."""


@EngineRegistry.register("language_model", "fsdp2", get_device_name(), vendor=get_vendor())
class Fp8Engine(FSDPEngineWithLMHead):
    """Trains in FP8 and sends KV scales behind the weights; verl prefers it for its vendor."""

    def _build_module(self) -> Any:
        module = super()._build_module()
        if not self.engine_config.forward_only:  # the reference policy stays in BF16
            convert(module, RECIPE)
        return module

    def initialize(self) -> None:
        super().initialize()
        if not self.engine_config.forward_only:
            self.observer = QKVObserver(self.module)
            self.cache = KVCacheInTraining(self.module, RECIPE.kv_cache.dtype)
            tokens = self.model_config.get_processor()(FIRST_TEXT, return_tensors="pt")
            with torch.no_grad(), self.eval_mode():
                self.module(**tokens.to(get_device_id()))

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        scales = self.observer.scales(RECIPE.kv_cache.margin)
        self.observer.reset()
        return self._weights(scales), None

    def _weights(self, scales: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from chain(export_hf(self.module), scales.items())
        self.cache.set(scales)  # all have been sent


class Extension(RefitMixin, vLLMColocateWorkerExtension):
    """Receives weights in one checked refit."""

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm)
        refused: list[Fp8RLError] = []

        def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            try:
                session.load(weights if not refused else [])
            except Fp8RLError as error:  # the sender waits until each bucket has been received
                refused.append(error.with_traceback(None))  # which holds the bucket

        with RefitSession(self.model_runner.model, expect_kv_scales=True) as session:
            receiver.receive_weights(load)
            if refused:
                raise refused[0]
