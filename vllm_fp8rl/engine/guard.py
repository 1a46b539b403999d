"""`RefitGuard`: decides once in every step of an engine whether the model of a rank may run.

The check runs where vLLM builds a step's attention metadata: in Python on the host, before the
forward, in eager mode and before the replay of piecewise and full CUDA graphs alike, in both model
runners. :func:`guarded` makes the attention backend whose metadata builder checks, in the way in
which vLLM makes its own variants of a backend (``subclass_attention_backend``).
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from fp8rl.errors import Fp8RLError, RefitError, UnsupportedError
from vllm_fp8rl.engine.finite_weights import PlainValues

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend


REMEDY = "refit the engine with a complete set of tensors before generating"
PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Values of ``kv_cache_dtype`` of a cache that is not quantized."""
_DUMMY_RUNS = frozenset(
    {"determine_available_memory", "compile_or_warm_up_model", "execute_dummy_batch"}
)
"""Methods of vLLM's ``WorkerBase`` that run the model on dummy tokens; nobody reads the output."""
_SCAN_ELEMENTS = 1 << 26


class OpenSession(Protocol):
    """A refit that is under way, see :class:`~vllm_fp8rl.refit.receiver.session.RefitSession`."""

    name: str
    """Whoever knows it may go on with the session, so no error and no log line has it."""
    loading: bool

    def abandon(self, reason: str) -> None:
        """End the refit."""


class RefitGuard:
    """Decides whether the model of one rank may run.

    A step raises

    * while a refit is under way, or the weights are half-updated;
    * while FP8 codes lack their scales;
    * while an FP8 KV cache lacks its scales, or may hold codes of other scales;
    * while KV scales are being calibrated;
    * while weights or KV cache sleep;
    * after a refused step, until its requests and what they left in the KV cache are gone;
    * after a level-2 sleep, which discards weights, until every one of them has come again.

    Each cause calls :meth:`recheck`; without one a step costs the test of a flag.

    Args:
        layers: layers of the engine by name. A layer's ``quant_method`` may have
            ``require_ready(layer)``, which raises unless the layer can run, ``discard(layer)``,
            called when its parameters became NaN, ``restore(layer)``, which puts back, e.g.
            after a sleep, what no refit brings, and ``derive(layer)``, see :meth:`derive`.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        self.session: OpenSession | None = None
        self.plain_load = threading.Lock()
        """Held while a plain load, of ``reload_weights`` perhaps, is writing. A lock, since Python
        runs no signal handler between ``with`` and it: Ctrl-C does not leave it behind."""
        self.may_sleep = False
        self.layers = layers
        self._reason: str | None = None
        self._asleep: set[str] = set()
        self._restore = False
        self._lost: dict[str, torch.Tensor] = {}
        self._discarded: list[tuple[str, torch.Tensor]] = []
        self._ready = False
        self.scale_epoch = 0
        """Number of the KV scales in service; a refit that changes a scale begins a new epoch."""
        self._cache_epoch: int | None = None
        """Epoch of the codes in the KV cache; None while it is empty."""
        self._outdated: str | None = None
        self.refused_step = False
        """A step was refused since the KV cache was emptied: vLLM enters blocks into its prefix
        cache before the step that fills them, and leaves the requests in flight."""
        self._calibration: Literal["closed", "running"] | None = None
        self.values = PlainValues()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called and :meth:`open` was not."""
        return self._reason is not None

    @property
    def loading(self) -> bool:
        """Whether the tensors being loaded come from the open session, which has checked them."""
        return self.session is not None and self.session.loading

    @property
    def label(self) -> str | None:
        """What others may know of the open session: enough to end it, not to go on with it."""
        if self.session is None:
            return None
        return hashlib.sha256(self.session.name.encode()).hexdigest()[:12]

    def require_free(self, what: str, *, beside: OpenSession | None = None) -> None:
        """Raise RefitError while weights are on their way, but for a session ``beside``."""
        if self.plain_load.locked():
            raise RefitError(
                f"{what} was refused, because load_weights or reload_weights is writing to this "
                "model; wait until it has returned."
            )
        if self.session is not None and self.session is not beside:
            raise RefitError(
                f"{what} was refused, because a refit of this model is already under way; wait "
                f"until it has ended, or, if its sender is gone, call fp8rl_refit_abort with its "
                f"label '{self.label}' and a reason."
            )

    def stop_writing(self, what: str) -> None:
        """End the open session, because the weights go; RefitError while a plain load writes."""
        if self.plain_load.locked():
            self.require_free(what)
        if self.session is not None:
            self.session.abandon(f"{what} took the weights away")

    def close(self, reason: str) -> None:
        """Refuse every step, by an error that begins with ``reason``."""
        self._reason = reason
        self.recheck()

    def open(self) -> None:
        """Take :meth:`close` back; the other conditions stay."""
        self._reason = None

    def recheck(self) -> None:
        """Check every condition in the next step."""
        self._ready = False

    def restore(self) -> None:
        """Let the next step write again the values that no refit brings, such as KV scales."""
        self._restore = True
        self.recheck()

    def outdate_cache(self, what: str) -> None:
        """Refuse every step until the KV cache is emptied, unless no step has written to it."""
        if self._cache_epoch is not None:
            self._outdated = what
            self.recheck()

    def begin_scale_epoch(self) -> None:
        """Note that a K or V scale changes: codes in the KV cache belong to an older epoch now."""
        self.scale_epoch += 1
        self.recheck()

    def cache_emptied(self) -> None:
        """Note that neither vLLM's prefix cache nor a request holds a KV block any more."""
        self._cache_epoch = self._outdated = None
        self.refused_step = False
        self.recheck()

    @property
    def cache_outdated(self) -> bool:
        """Whether steps are refused until the KV cache is emptied, requests' blocks included."""
        return self._outdated is not None or self._cache_epoch not in (None, self.scale_epoch)

    @property
    def calibrating(self) -> bool:
        """Whether attention runs with provisional KV scales."""
        return self._calibration is not None

    def calibrate(self, state: Literal["closed", "running"] | None) -> None:
        """Note that attention runs with provisional KV scales.

        Args:
            state: ``closed`` refuses every step; ``running`` lets the steps of the calibration
                pass; None means that the loaded scales are back.
        """
        self._calibration = state
        self.recheck()

    def sleep(self, tags: Sequence[str], discarded: Mapping[str, torch.Tensor]) -> None:
        """Note that the engine falls asleep, unless a plain load is writing (RefitError).

        Args:
            tags: ``weights``, ``kv_cache`` or both, whichever memory is given back.
            discarded: parameters whose contents will not come back by themselves.
        """
        if "weights" in tags:
            self.stop_writing("A sleep")
        self._asleep.update(tags)
        self._lost.update(discarded)
        self.recheck()

    def wake(self, tags: Sequence[str] | None) -> None:
        """Note that memory is back (None: all), and fill discarded parameters with NaN."""
        was_asleep = "weights" in self._asleep
        self._asleep.difference_update(self._asleep if tags is None else tags)
        self._restore = True
        if was_asleep and "weights" not in self._asleep:
            # Parameters that only an earlier sleep discarded came back as they were.
            for tensor in self._lost.values():
                _fill_with_nan(tensor)
            if self._lost:
                self._each("discard")
            self._discarded = list({**dict(self._discarded), **self._lost}.items())
            self._lost = {}
        self.recheck()

    def require_awake(self) -> None:
        """Raise RefitError while there is no memory to write weights or scales to."""
        if "weights" in self._asleep:
            raise RefitError(
                "The engine's weights sleep; wake them first, e.g. with "
                "llm.wake_up(tags=['weights'])."
            )

    def check(self) -> None:
        """Raise RefitError or ScaleError unless the model can run; vLLM's dummy runs always may."""
        if self._ready or _is_dummy_run():
            return
        try:
            self.require_ready()
        except Fp8RLError:
            self.refused_step = True
            raise
        self._ready, self._cache_epoch = True, self.scale_epoch

    def require_ready(self) -> None:
        """Raise unless the model can run, as :meth:`check`; check every condition."""
        if self._reason is not None:
            raise RefitError(f"{self._reason}; {REMEDY}.")
        if self._calibration == "closed":
            raise RefitError(
                "KV scales are being calibrated, or a calibration broke off; calibrate again, send "
                "KV scales, refit the engine, or call fp8rl_stop_observing_kv for the old scales."
            )
        if self.cache_outdated:
            held = self._outdated or (
                f"codes of older KV scales (epoch {self._cache_epoch}; those of epoch "
                f"{self.scale_epoch} are in service)"
            )
            raise RefitError(
                f"The KV cache may hold {held}; call reset_prefix_cache, with reset_connector=True "
                "where a KV connector is in use and reset_running_requests=True where requests are "
                "in flight, until it answers True."
            )
        self.require_awake()
        if self._asleep:
            raise RefitError("The engine's KV cache sleeps; wake it first with llm.wake_up().")
        if self._restore:
            # After a wake-up, not in it: vLLM 0.25.1 ends it by setting KV scales to 1.
            self._each("restore")
            self._restore = False
        self._require_loaded()
        self.values.require_finite()
        self._each("require_ready")
        if self.refused_step:
            raise RefitError(
                "A step was refused, whose requests and blocks of the prefix cache were never "
                "computed; drop them with vllm_fp8rl.refit.drop_requests(llm), or call "
                "reset_prefix_cache with reset_running_requests=True."
            )
        self.derive()

    def derive(self) -> None:
        """Make again, in place, what layers keep beside their weights and take from them.

        Every write to a weight closes the model for its time, so that the next step asks for this.
        """
        self._each("derive")

    def _require_loaded(self) -> None:
        self._discarded = [(name, t) for name, t in self._discarded if _has_nan(t)]
        if self._discarded:
            raise RefitError(
                f"reset_weights or a level-2 sleep discarded '{self._discarded[0][0]}' and no "
                f"refit has brought it since ({len(self._discarded)} such parameters); {REMEDY}."
            )

    def _each(self, step: str) -> None:
        for layer in list(self.layers.values()):
            method = getattr(getattr(layer, "quant_method", None), step, None)
            if method is not None:
                method(layer)


@cache
def guarded(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return a variant of a backend whose metadata builder asks the guard in every step."""
    from vllm.v1.attention.backend import subclass_attention_backend

    stock: Any = backend.get_builder_cls()

    class GuardedBuilder(stock):
        def __init__(
            self, spec: Any, layer_names: list[str], vllm_config: Any, *rest: Any, **options: Any
        ) -> None:
            super().__init__(spec, layer_names, vllm_config, *rest, **options)
            layers = vllm_config.compilation_config.static_forward_context
            require_known_caches(layers)
            self._guard: RefitGuard = layers[layer_names[0]].quant_method.state.guard
            self._guard.derive()  # before graphs are captured; a refusal ends the start

        def build(self, *args: Any, **kwargs: Any) -> Any:
            self._guard.check()
            return super().build(*args, **kwargs)

    return subclass_attention_backend("Fp8RLGuarded", backend, GuardedBuilder)


def require_known_caches(layers: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a layer whose KV cache has 8 bits and whose scales nobody sets."""
    for name, layer in layers.items():
        dtype = getattr(layer, "kv_cache_dtype", "auto")
        known = hasattr(getattr(layer, "quant_method", None), "require_ready")
        if not known and dtype not in PLAIN_KV_DTYPES:
            raise UnsupportedError(
                f"'{name}' ({type(layer).__name__}) has a KV cache of dtype '{dtype}' and was "
                "built without the engine's quantization, so its scales would stay 1.0; set "
                "kv_cache.dtype to 'auto' in the recipe."
            )


def _is_dummy_run() -> bool:
    # vLLM has no flag for this: its second model runner warms up through ``execute_model``. Where
    # vLLM has renamed a method, an engine that waits for KV scales fails at the start.
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _DUMMY_RUNS:
            return True
        frame = frame.f_back
    return False


def _fill_with_nan(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.data.fill_(torch.nan)
    elif tensor.is_floating_point():
        tensor.data.view(torch.uint8).fill_(0xFF)  # NaN in every FP8 format


@torch.no_grad()
def _has_nan(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    parts = tensor.data.reshape(-1).split(_SCAN_ELEMENTS)
    return bool(torch.stack([_nan_codes(part).any() for part in parts]).any())


def _nan_codes(part: torch.Tensor) -> torch.Tensor:
    if part.dtype == torch.float8_e4m3fn:
        return (part.view(torch.uint8) & 0x7F) == 0x7F
    return (part.float() if part.element_size() == 1 else part).isnan()
