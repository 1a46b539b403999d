"""`Fp8Trainer`: what fp8rl adds to NeMo RL's policy workers; `Fp8Training`: to the Megatron one."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fp8rl.errors import CheckpointError
from fp8rl.kv_scales import check_scale, next_scales, parse_scale_name, power_of_two_scales
from fp8rl.reading import parse_json
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.names import LOGGER
from nemo_rl_ext.workers.kept_codes import DeviceMemory, KeptCodes
from nemo_rl_ext.workers.logprobs import fuse_logprobs
from nemo_rl_ext.workers.refit import NOT_SENT

if TYPE_CHECKING:
    from fp8rl.training.kv import AmaxTable, RoundedKV
    from megatron_fp8rl.conversion import Conversion
    from megatron_fp8rl.router_replay import ReplayedRoutes

logger = logging.getLogger(LOGGER)

T = TypeVar("T")

KEEP_CODES_ENV = "FP8RL_KEEP_CODES"

SCALES_FILE = "fp8rl_kv_scales.json"
"""File of KV scales in the folder of a checkpoint's weights."""

Scales = Mapping[str, float]
"""KV scale by name."""


class Fp8Trainer:
    """Mixin for NeMo RL's policy workers; a subclass stands before upstream's class in the bases.

    It converts the model, and sets the attributes below that are None without it.

    Args:
        kwargs: see upstream; ``weights_path`` is the folder of the checkpoint to resume from, whose
            KV scales go on.

    Raises:
        CheckpointError: the checkpoint's KV scales are damaged.
    """

    calibration_options: Mapping[str, Any] = MappingProxyType({})
    """Of upstream's ``get_logprobs`` in a calibration forward."""

    cfg: Any
    model: torch.nn.Module
    _plan: RunPlan
    _kept_codes: KeptCodes | None = None
    """None without an FP8 linear on this rank, on a CPU, and where it is switched off."""
    _qkv_observer: AmaxTable | None = None
    _kv_cache: RoundedKV | None = None
    _kv_scales: Scales = MappingProxyType({})
    """KV scales of the last calibration, which are in service after the refit that follows; those
    of the checkpoint in a run that is resumed."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        plan = RunPlan.of(config)
        assert plan is not None  # by which this class was chosen
        self._plan = plan
        self._kv_scales = _saved_scales(kwargs.get("weights_path"))
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def calibrate_qkv_fp8_scales(
        self,
        *,
        data: Any,
        micro_batch_size: int | None = None,
        include_q: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """KV scales in upstream's form, from the forwards of the step; the same on every rank.

        Args:
            data: batch for a calibration forward, used when no forward has run since the last call.
            options: ``percentile`` and ``margin``, for upstream's own calibration. Here the
                largest magnitude and the recipe's ``kv_cache.margin`` take their places.

        Returns:
            ``format``, ``percentile``, ``margin``, ``layers``: scale by name, and ``outgrown``:
            names of scales that values of the step have left (see
            :func:`fp8rl.kv_scales.next_scales`).

        Raises:
            ScaleError: a layer saw no token, or a NaN.
        """
        recipe = self._plan.of_trainer
        assert recipe is not None
        if self._qkv_observer is None:
            self._qkv_observer = self._observe(self.model)
        observer = self._qkv_observer
        amax = observer.amax()
        # The same on every rank: a maximum over the world.
        forward = not bool((amax[observer.layers] > 0).all())
        if forward:
            self.model.eval()
            with torch.no_grad():
                # Upstream's own: this batch is no measure of the memory that others need.
                super().get_logprobs(  # type: ignore[misc]
                    data=data, micro_batch_size=micro_batch_size, **self.calibration_options
                )
            amax = observer.amax()
        observer.reset()
        scales, outgrown = next_scales(self._kv_scales, amax, recipe.kv_cache, observer.layers)
        layers = unlike_placeholders({name: float(scale) for name, scale in scales.items()})
        self._kv_scales = layers
        ordered = sorted(layers.items(), key=lambda item: item[1])
        logger.info(
            "fp8rl: KV scales from %s (%d outgrown): %s",
            "a calibration forward" if forward else "the step's forwards",
            len(outgrown),
            ", ".join(f"{name} {scale:.6g}" for name, scale in (ordered[0], ordered[-1])),
        )
        return {
            "format": "fp8",
            "percentile": 100.0,
            "margin": recipe.kv_cache.margin,
            "layers": {n: s for n, s in layers.items() if include_q or not n.endswith("q_scale")},
            "outgrown": list(outgrown),
        }

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int = 0, kv_scales: Scales | None = None, **options: Any
    ) -> Any:
        """Upstream's refit of engines on the same GPUs; its KV scales are in service from now on.

        Args:
            kv_scales: scale by name; none before the driver's first calibration.
        """
        upstream = super().stream_weights_via_ipc_zmq  # type: ignore[misc]
        send = functools.partial(upstream, buffer_size_bytes=buffer_size_bytes, **options)
        result = self._send(send, kv_scales)
        self._put_into_service(kv_scales)
        return result

    def broadcast_weights_for_collective(
        self, kv_scales: Scales | None = None, **options: Any
    ) -> Any:
        """As :meth:`stream_weights_via_ipc_zmq`, for engines on other GPUs."""
        upstream = super().broadcast_weights_for_collective  # type: ignore[misc]
        result = self._send(functools.partial(upstream, **options), kv_scales)
        self._put_into_service(kv_scales)
        return result

    def save_checkpoint(self, weights_path: str, *args: Any, **kwargs: Any) -> Any:
        """Upstream's checkpoint, and beside it the KV scales that a resumed run goes on with."""
        result = super().save_checkpoint(weights_path, *args, **kwargs)  # type: ignore[misc]
        if self._kv_scales and torch.distributed.get_rank() == 0:
            _save_scales(weights_path, self._kv_scales)
        return result

    def get_logprobs(self, *, data: Any, **kwargs: Any) -> Any:
        """Upstream's log-probabilities of a batch, of the reference policy too; weight codes are
        kept over its micro-batches where memory allows."""
        upstream = super().get_logprobs  # type: ignore[misc]
        return self._keeping_codes(
            "get_logprobs", data, functools.partial(upstream, data=data, **kwargs)
        )

    def train(
        self, data: Any, *args: Any, eval_mode: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Upstream's training of a batch, with one optimizer step or several.

        Weight codes are kept between two steps, where memory allows. The metrics tell of clipped K
        and V.
        """
        call = "train in eval_mode" if eval_mode else "train"
        upstream = super().train  # type: ignore[misc]
        run = functools.partial(upstream, data, *args, eval_mode=eval_mode, **kwargs)
        result = self._keeping_codes(call, data, run, backward=not eval_mode)
        return self._with_clipped(result)

    def _observe(self, model: torch.nn.Module) -> AmaxTable:
        """Watch q, k and v in every forward of a model from now on."""
        raise NotImplementedError

    def _data_parallel_ranks(self) -> int:
        raise NotImplementedError

    def _keeping_codes(
        self, call: str, data: Any, run: Callable[[], T], *, backward: bool = False
    ) -> T:
        if self._kept_codes is None:
            return run()
        tokens = largest_micro_batch(self.cfg, data)
        return self._kept_codes.during(call, run, tokens=tokens, backward=backward)

    def _send(self, upstream: Callable[..., Any], scales: Scales | None) -> Any:
        """Call upstream's refit, and let the KV scales go with it."""
        return upstream(kv_scales=scales)

    def _put_into_service(self, scales: Scales | None) -> None:
        if self._kv_cache is None or not self._kv_cache.has_scales:
            return
        if scales:
            self._kv_cache.set(scales)
            return
        self._kv_cache.clear()
        logger.warning(
            "fp8rl: this refit sent no KV scales (grpo.val_at_start), so vLLM calibrates its own; "
            "until the next one the trainer attends over K and V in its own dtype."
        )

    def _with_clipped(self, result: dict[str, Any]) -> dict[str, Any]:
        if self._kv_cache is not None:
            # The driver adds up what the data-parallel ranks report; this is the same on all.
            ranks = self._data_parallel_ranks()
            for name, share in self._kv_cache.metrics().items():
                result["all_mb_metrics"][f"fp8rl/{name}"] = [share / ranks]
        return result


class Fp8Training(Fp8Trainer):
    """Mixin for NeMo RL's Megatron policy worker; it stands before upstream's class in the bases.

    NeMo RL's own FP8 training is Transformer Engine's, which cannot pin single layers from YAML and
    whose FP8 data are not those of the rollout engine. Its calibration of KV scales runs one more
    forward over the whole batch each step, and numbers the layers of a pipeline stage from 0. All
    models of the worker are built without a norm of Moonlight's that Hugging Face's does not have
    (:func:`megatron_fp8rl.compat.without_query_norm`).
    """

    calibration_options = MappingProxyType({"require_router_replay": False})

    upstream_module: Any
    """The module that defines upstream's class."""

    _replayed_routes: ReplayedRoutes | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_fp8rl.compat import without_query_norm

        # Upstream's constructor calls this function of its module, and has no way to pass hooks.
        setup = self.upstream_module.setup_model_and_optimizer
        self.upstream_module.setup_model_and_optimizer = functools.partial(self._set_up, setup)
        try:
            # Whatever the recipe: imported weights, teachers and reference models are Moonlights
            # of Hugging Face too.
            with without_query_norm():
                super().__init__(config, *args, **kwargs)
        finally:
            self.upstream_module.setup_model_and_optimizer = setup

    def _set_up(
        self,
        setup: Callable[..., Any],
        policy: Mapping[str, Any],
        megatron: Any,
        load_optimizer: bool,
        **options: Any,
    ) -> Any:
        """Call upstream's ``setup_model_and_optimizer``; convert and observe a model that trains.

        Its attention sees K and V as the rollouts' cache of 8 bits holds them
        (``kv_cache.in_training``), where that is in E4M3 once a refit has sent scales.
        On a GPU log-probabilities that are computed in chunks are those of
        :class:`nemo_rl_ext.workers.logprobs.FusedLogprob`; with ``exact`` those of ``ExactLogprob``
        anywhere.
        The conversion runs before the model is wrapped, after upstream's adapters and draft models.
        A model without optimizer is a frozen teacher with a copy of the policy's section: it stays
        in BF16.
        """
        plan = self._plan
        if not load_optimizer:
            return setup(policy, megatron, load_optimizer, **options)
        recipe = plan.of_trainer
        if recipe is not None and recipe.training:
            from megatron_fp8rl.integrations.bridge import pre_wrap_hook

            hooks = options.get("additional_pre_wrap_hooks") or ()
            ours = pre_wrap_hook(recipe, converted=self._keep_codes_of)
            options["additional_pre_wrap_hooks"] = [*hooks, ours]
            if recipe.exact or torch.cuda.is_available():
                fuse_logprobs(policy, exact=recipe.exact)
        state = setup(policy, megatron, load_optimizer, **options)
        if recipe is not None and plan.kv_scales == "trainer":
            self._qkv_observer = self._observe(state.model)
        if plan.rounded_as != "auto":
            from megatron_fp8rl.kv.cache import KVCacheInTraining

            self._kv_cache = KVCacheInTraining(state.model, plan.rounded_as)
        if (policy.get("router_replay") or {}).get("enabled"):
            from megatron_fp8rl.router_replay import ReplayedRoutes

            self._replayed_routes = ReplayedRoutes(state.model, skip_placeholders=True)
        return state

    def _keep_codes_of(self, conversion: Conversion) -> None:
        if keeps_codes() and conversion.modules:
            self._kept_codes = kept_codes_of(conversion)

    def _observe(self, model: torch.nn.Module) -> AmaxTable:
        from megatron_fp8rl.kv.observers import QKVObserver

        return QKVObserver(model)

    def _data_parallel_ranks(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_world_size())

    def calibrate_qkv_fp8_scales(self, **options: Any) -> dict[str, Any]:
        """As :meth:`Fp8Trainer.calibrate_qkv_fp8_scales`; where only the rollouts run by a recipe,
        upstream's own scales, rounded up to powers of two."""
        if self._plan.of_trainer is not None:
            return super().calibrate_qkv_fp8_scales(**options)
        upstream = super(Fp8Trainer, self).calibrate_qkv_fp8_scales  # type: ignore[misc]
        cache = self._kv_cache
        with cache.switched_off() if cache is not None else nullcontext():
            found: dict[str, Any] = upstream(**options)
        if self._plan.kv_scales != "trainer":
            return found
        return {**found, "layers": unlike_placeholders(power_of_two_scales(found["layers"]))}

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As :meth:`Fp8Trainer.train`; the metrics tell of replay too."""
        return self._with_replay(super().train(*args, **kwargs))

    def train_microbatch(self, data: Any, *args: Any, **kwargs: Any) -> None:
        """Upstream's piece of a step of the single controller, of several micro-batches."""
        upstream = super().train_microbatch  # type: ignore[misc]
        run = functools.partial(upstream, data, *args, **kwargs)
        self._keeping_codes("train_microbatch", data, run, backward=True)

    def finish_train_step(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As :meth:`train`, for the single controller, whose step comes in pieces."""
        result = super().finish_train_step(*args, **kwargs)  # type: ignore[misc]
        return self._with_replay(self._with_clipped(result))

    def _log_gpu_mem(self, *args: Any, **kwargs: Any) -> None:
        """Upstream's, which resets torch's peak of memory when the log's level is DEBUG, in
        :meth:`train_microbatch` too."""
        if self._kept_codes is not None:
            self._kept_codes.note_peak()
        super()._log_gpu_mem(*args, **kwargs)  # type: ignore[misc]

    def _with_replay(self, result: dict[str, Any]) -> dict[str, Any]:
        """Add what replay changed since the last step, log-probability forwards included."""
        if self._replayed_routes is None:
            return result
        metrics = self._replayed_routes.metrics()
        named = {f"fp8rl/{name}": value for name, value in metrics.items()}
        return {**result, "moe_metrics": {**result.get("moe_metrics", {}), **named}}


def keeps_codes() -> bool:
    """Tell whether workers of this process may keep weight codes: on a GPU, by default."""
    return os.environ.get(KEEP_CODES_ENV) != "0" and torch.cuda.is_available()


def kept_codes_of(conversion: Conversion, memory: DeviceMemory | None = None) -> KeptCodes:
    """Make the :class:`KeptCodes` of a converted Megatron model."""
    from megatron_fp8rl.layers.linear_modules import weights_of

    modules: list[Any] = list(conversion.modules.values())
    return KeptCodes(
        conversion.keeping_codes,
        sum(w.numel() for module in modules for w in weights_of(module)),
        # Of the model, whose experts may all be pinned to BF16.
        experts=any(module.config.num_moe_experts for module in modules),
        memory=memory,
    )


def largest_micro_batch(policy: Mapping[str, Any], data: Any) -> int:
    """Tokens of the largest micro-batch of a worker's batch, padding included.

    Where all have as many rows, as without packing and dynamic batching, those of one row.
    """
    lengths = getattr(data, "micro_batch_lengths", None)  # of each step of the batch
    if lengths is None:
        return int(data["input_ids"].shape[1])
    if not (policy.get("dynamic_batching") or {}).get("enabled"):
        return max(length for step in lengths for length in step)  # packed: of all rows together
    return max(
        length * (end - start)  # padded to the longest row
        for step, rows in zip(lengths, data.micro_batch_indices, strict=True)
        for length, (start, end) in zip(step, rows, strict=True)
    )


def unlike_placeholders(scales: Scales) -> dict[str, float]:
    """Double one scale where the engines would take all of them for scales that were not sent.

    NeMo RL sends 1.0 for a missing scale. A scale that is larger than needed clips nothing.
    """
    cached = {scale for name, scale in scales.items() if not name.endswith("q_scale")}
    if cached == {NOT_SENT}:
        first = next(name for name in scales if name.endswith("k_scale"))
        return {**scales, first: 2 * NOT_SENT}
    return dict(scales)


def _save_scales(weights_path: str, scales: Scales) -> None:
    """Write the scales so that a kill at any moment leaves a whole file or none."""
    path = Path(weights_path, SCALES_FILE)
    partial = path.with_name(f".{SCALES_FILE}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(dict(scales), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _saved_scales(weights_path: str | None) -> Scales:
    """KV scales of the checkpoint to resume from; empty if there is none, or it has none.

    Raises:
        CheckpointError: the file cannot be read, or holds something else than KV scales.
    """
    if weights_path is None or not Path(weights_path, SCALES_FILE).exists():
        return {}
    path = Path(weights_path, SCALES_FILE)
    try:
        found = parse_json(path.read_text(encoding="utf-8"), "The file")
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not scales by name")
        for name, scale in found.items():
            if parse_scale_name(name) is None or isinstance(scale, bool | str | list | dict | None):
                raise ValueError(f"{name!r}: {scale!r} is no KV scale")
            check_scale(name, scale)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The KV scales '{path}' cannot be read ({error}); resume from an older checkpoint, or "
            "delete that file, and the first step measures new scales."
        ) from None
    return found
