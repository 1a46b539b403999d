"""`RefitSession`: one refit of one rank's model, every tensor checked before it is written.

The walk of a weight: :meth:`RefitSession.load` checks a batch,
:meth:`~vllm_fp8rl.refit.receiver.inventory.Inventory.write` sends each tensor along its route,
:class:`~vllm_fp8rl.storage.block_grid.BlockGrid` finds the rows of live storage, and
:func:`fp8rl.numerics.quantize_blocks` quantizes all of them together.

Modules that import vLLM are imported in functions, so that importing this module does not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from fp8rl.errors import Fp8RLError, RefitError
from fp8rl.kv_scales import check_scale, parse_scale_name, scale_name
from fp8rl.numerics import FP8_DTYPE, parts, start_finite_check
from fp8rl.plugins.hookspecs import RefitReport
from vllm_fp8rl.compat import reported_name
from vllm_fp8rl.engine.finite_weights import not_finite
from vllm_fp8rl.engine.guard import REMEDY
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv.observer import stop_observing
from vllm_fp8rl.kv.scales import scales_change, set_kv_scales
from vllm_fp8rl.refit.tensor_stream import Named, came_twice, scalars_on_host, steady
from vllm_fp8rl.storage.block_grid import SOURCE_DTYPES, check_scales

if TYPE_CHECKING:
    from vllm_fp8rl.refit.receiver.inventory import Entry, Inventory

Tensors = Iterable[tuple[str, torch.Tensor]]

_SCALES = "_scale_inv"
_WEIGHTS = ("codes", "plain")


class RefitSession:
    """One refit of one rank's live model, as a context manager.

    A whole batch is checked before its first tensor is written. Leaving the block without an
    exception verifies that every parameter and every KV scale came exactly once; then the report
    is in ``report``. Otherwise the model refuses to run until a later refit is complete, unless
    nothing had been written yet. The caller must then empty the prefix cache, which may hold keys
    of the old weights: ``reset_prefix_cache(reset_connector=True)``.

    Args:
        model: the vLLM model of this rank.
        expect_kv_scales: whether k and v scales of every layer come with the weights; None: either
            all or none.
        name: a name that no other sender knows, so that none goes on with this session; None: a
            random one.

    Raises:
        RefitError: on entry, when another session is open or the engine has no FP8 KV cache to
            scale; from :meth:`load`, a tensor that is unknown, repeated, wrongly shaped, of a wrong
            dtype, not finite as it comes or as the engine stores it, or whose FP8 codes would have
            to be quantized again; on exit, a tensor that is missing.
        ScaleError: a scale that is 0, negative, NaN or infinite, or not of the engine's format.
        UnsupportedError: a pipeline-parallel engine.
    """

    def __init__(
        self, model: torch.nn.Module, *, expect_kv_scales: bool | None, name: str | None = None
    ) -> None:
        self.model: Any = model  # its load_weights is not in torch's class
        self.name = uuid.uuid4().hex if name is None else name
        self.expect_kv_scales = expect_kv_scales
        self.report: RefitReport | None = None
        self.wrote = False
        self.loading = False
        """Whether vLLM's loader is writing tensors of this session at the moment."""
        self._guard = state_of(model).guard
        self._inventory: Inventory
        self._entries: dict[str, Entry] = {}
        self._scales: frozenset[str] = frozenset()
        self._dtypes: dict[str, torch.dtype] = {}
        self._parameters: set[str] = set()
        self._kv_scales: dict[str, float] = {}
        self._came: set[str] = set()
        """Names that have come, alone or in a fused tensor."""
        self._scaled: set[str] = set()
        self._written: set[str] = set()
        """Tied tensors, by their first name."""
        self._left_out = 0
        self._bytes = 0
        self._started = 0.0

    def __enter__(self) -> RefitSession:
        from vllm_fp8rl.refit.receiver.inventory import Inventory, require_one_stage

        self._guard.require_free("A refit")
        self._guard.require_awake()
        stop_observing(self.model)  # of a calibration that broke off
        require_one_stage()
        self._inventory = inventory = Inventory.of(self.model)
        self._entries, self._scales = inventory.entries, inventory.kv_scales
        if self.expect_kv_scales and not self._scales:
            raise RefitError(
                "KV scales were announced, but the engine has no FP8 KV cache; start it with "
                "kv_cache_dtype='fp8_e4m3' or refit with expect_kv_scales=False."
            )
        self._guard.session = self
        self._started = time.perf_counter()
        return self

    def load(self, batch: Tensors) -> None:
        """Check a batch of HF-named tensors, then write it into the live weights.

        Args:
            batch: whole HF tensors: bfloat16, float16 or float32; FP8 codes with their
                ``weight_scale_inv`` for FP8 layers; KV scales by the names of
                :mod:`fp8rl.kv_scales`. A generator is exhausted before its first tensor is read.

        Raises:
            RefitError: see the class; or tensors share memory, as with a generator that fills one
                buffer again and again; or the GPU's memory did not suffice.
        """
        if self._guard.session is not self:
            raise _ended()
        try:
            self._load(batch)
        except torch.OutOfMemoryError as error:
            raise RefitError(
                f"No memory was left to load a batch of tensors ({str(error).splitlines()[0]}); "
                "send smaller batches (batch_bytes), or give vLLM less (gpu_memory_utilization)."
            ) from error

    def check(self, coming: Iterable[Named]) -> None:
        """Refuse tensors by name, shape and dtype before their values are read.

        Args:
            coming: tensors on the meta device.

        Raises:
            RefitError: the session is not open; the model has no such tensor, or it has come; or it
                is no whole tensor of a dtype that a refit takes.
        """
        if self._guard.session is not self:
            raise _ended()
        seen: set[str] = set()
        for name, tensor in coming:
            if name in self._came or name in seen:
                raise came_twice(name)
            seen.add(name)
            if name in self._entries:
                self._check(name, tensor, self._entries[name])
            elif not self._inventory.leaves_out(name):
                self._known_kv_scale(name)
                if tensor.numel() != 1:
                    check_scale(name, tensor)

    def _load(self, batch: Tensors) -> None:
        sent = steady(batch)
        entries, came = self._entries, self._came
        known = [item for item in sent if item[0] in entries]
        others = [item for item in sent if item[0] not in entries]
        others = [item for item in others if not self._inventory.leaves_out(item[0])]
        left_out = len(sent) - len(known) - len(others)
        others = scalars_on_host(others)  # which waits for the GPU, so before it gets work
        limit = self._guard.values.limit(self.model)
        finite = start_finite_check([tensor for _, tensor in known], limit)  # a GPU reads meanwhile
        arriving: dict[str, torch.dtype] = {}
        kv_scales: dict[str, float] = {}
        covered: set[str] = set()
        scales: list[Named] = []
        parameters: set[str] = set()
        for name, tensor in others:
            key = self._known_kv_scale(name)
            kv_scales[key] = check_scale(name, tensor)
            if key in arriving or key in came:
                raise came_twice(name)
            arriving[key] = tensor.dtype
        for name, tensor in known:
            entry, dtype = entries[name], tensor.dtype
            if name in arriving or name in came or name in covered:
                raise came_twice(name)
            arriving[name] = dtype
            parameters.add(entry.parameter)
            if entry.kind in _WEIGHTS and dtype in SOURCE_DTYPES and tensor.shape == entry.shape:
                continue
            self._check(name, tensor, entry)
            if entry.kind == "scales":
                scales.append((name, tensor))
            if any(part in names for names in (arriving, came, covered) for part in entry.covers):
                raise came_twice(name)
            covered.update(entry.covers)
        scaled = self._check_pairs(arriving)
        bad = [item for item, good in zip(known, finite(), strict=True) if not good]
        if bad:
            raise RefitError(f"{not_finite(*bad[0], limit)}; the engine was not given it.")
        for name, tensor in scales:
            check_scales(name, tensor, self._inventory.grids[0].scale_format)
        if known:
            self._write(known)
        self._kv_scales |= kv_scales
        self._dtypes |= arriving
        self._parameters |= parameters
        self._scaled = scaled
        self._came.update(arriving, covered)
        self._left_out += left_out
        self._bytes += sum(tensor.nbytes for _, tensor in sent)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abandon(kind.__name__)
            return
        if self._guard.session is not self:
            raise _ended()
        self._guard.session = None
        try:
            self._verify_complete()
        except Fp8RLError:
            self._leave_closed("a refit was incomplete")
            raise
        # Only now: the scales of a refit that breaks off must not serve with the next weights.
        set_kv_scales(self.model, self._kv_scales)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # from now on the sender may free or reuse its tensors
        self.report = RefitReport(
            parameters=len(self._parameters),
            kv_scales=len(self._scales & self._dtypes.keys()),
            tensors=len(self._dtypes) + self._left_out,
            received_bytes=self._bytes,
            seconds=time.perf_counter() - self._started,
            scale_epoch=self._guard.scale_epoch,
            left_out=self._left_out,
        )
        self._guard.values.forget()
        self._guard.open()

    @property
    def changes_scales(self) -> bool:
        """Whether a K or V scale that has come differs from the one in service."""
        return scales_change(self.model, self._kv_scales)

    def abandon(self, reason: str) -> None:
        """Give up. If nothing was written all stays as it was, else the model refuses to run.

        Does nothing if the session has ended already: another one may be open by now.
        """
        if self._guard.session is not self:
            return
        self._guard.session = None
        self._leave_closed(f"a refit broke off ({reason})")

    def _leave_closed(self, what: str) -> None:
        if self.wrote:
            self._guard.close(f"The weights are half-updated: {what}")

    def _check(self, name: str, tensor: torch.Tensor, entry: Entry) -> None:
        """Check the shape and dtype of one tensor."""
        if tensor.shape != entry.shape:
            raise RefitError(
                f"'{name}' has shape {tuple(tensor.shape)}, but the engine's model has "
                f"{entry.shape}; send the whole HF tensor."
            )
        if tensor.dtype not in SOURCE_DTYPES and not (
            entry.kind == "codes" and tensor.dtype == FP8_DTYPE
        ):
            also = ", or float8_e4m3fn with its scales" if entry.kind == "codes" else ""
            raise RefitError(
                f"'{name}' has dtype {tensor.dtype}; send bfloat16, float16 or float32{also}."
            )
        if not entry.codes_fit and (tensor.dtype == FP8_DTYPE or entry.kind == "scales"):
            raise RefitError(
                f"'{name}' came for FP8 codes, whose 128x128 blocks are no blocks of this rank's "
                f"'{entry.parameter}': quantizing them once more would change the weights; send "
                "the weight in BF16."
            )

    def _write(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        if not self.wrote:
            for grid in self._inventory.grids:
                grid.forget_unpaired()
            self.wrote = True
            self._guard.close("a refit is under way")
            self._guard.values.owed = set()  # from here on no plain load opens the model
        special = self._inventory.special
        batch = [item for item in weights if item[0] not in special]
        others = list(self._untied([item for item in weights if item[0] in special]))
        batch += [item for item in others if self._entries[item[0]].route is not None]
        self._inventory.write(batch, [])
        rest = [item for item in others if self._entries[item[0]].route is None]
        if rest:
            self._write_by_vllm(rest)
        self._written.update(name for name, _ in others)

    def _write_by_vllm(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write tensors for which the inventory has no route."""
        self.loading = True
        try:
            loaded = self.model.load_weights(weights)
        finally:
            self.loading = False
        self._verify_taken([name for name, _ in weights], loaded)

    def _known_kv_scale(self, name: str) -> str:
        """Return the canonical name of a tensor that is no weight of the model."""
        parsed = parse_scale_name(name)
        if parsed is None:
            raise RefitError(
                f"The engine's model has no tensor '{name}'; send the HF names of the checkpoint "
                "that it was started with."
            )
        canonical = scale_name(*parsed)
        if self.expect_kv_scales is False:
            raise RefitError(
                f"KV scale '{name}' came unannounced; refit with expect_kv_scales=True, or leave "
                "the scales out."
            )
        if scale_name(parsed[0], "k") not in self._scales:
            raise RefitError(f"KV scale '{name}' is for a layer that this engine does not have.")
        return canonical

    def _check_pairs(self, arriving: dict[str, torch.dtype]) -> set[str]:
        """Return the names of all scales of FP8 codes that have come, those arriving included."""
        scaled = self._scaled | {name for name in arriving if name.endswith(_SCALES)}
        for scales in scaled:
            weight = scales.removesuffix(_SCALES)
            dtype = arriving.get(weight, self._dtypes.get(weight, FP8_DTYPE))
            if dtype == FP8_DTYPE:
                continue
            if scales in arriving:
                raise RefitError(
                    f"'{scales}' came with '{weight}' in {dtype}; scales belong to FP8 codes."
                )
            raise RefitError(
                f"'{weight}' came in {dtype} after its scales; they belong to FP8 codes."
            )
        return scaled

    def _untied(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stream with tied tensors under their first name, and each of them once.

        vLLM skips the second name unread, or raises where the first is not in the same batch.
        """
        batch: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            entry = self._entries[name]
            first = entry.alias_of or name
            if first in batch:
                same = torch.equal(batch[first], tensor)
            elif first in self._written:
                same = _equals_live(self.model, entry, tensor)
            else:
                batch[first] = tensor
                yield first, tensor
                continue
            if not same:
                raise RefitError(
                    f"'{name}' is tied to another tensor of this engine, '{first}' or its alias, "
                    "but came with other values; send them equal, or untie them in the config."
                )

    def _verify_taken(self, arriving: Iterable[str], loaded: set[str] | None) -> None:
        """Raise RefitError for a tensor that vLLM's loader skipped without an error."""
        taken = {reported_name(name) for name in loaded or ()}
        for name in arriving:
            entry = self._entries.get(name)
            if entry is None or entry.alias_of is not None or loaded is None or not entry.local:
                continue
            if reported_name(entry.parameter) not in taken:
                raise RefitError(
                    f"vLLM did not take '{name}' for its parameter '{entry.parameter}'; this model "
                    "class loads weights in a way that fp8rl does not know."
                )

    def _verify_complete(self) -> None:
        received, came = self._dtypes, self._came
        missing = [name for name in self._inventory.required if name not in came]
        missing += [
            name + _SCALES
            for name, dtype in received.items()
            if dtype == FP8_DTYPE and name + _SCALES not in received
        ]
        if self.expect_kv_scales or (
            self.expect_kv_scales is None and self._scales & received.keys()
        ):
            missing += sorted(self._scales - received.keys())
        if missing:
            shown = ", ".join(f"'{name}'" for name in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise RefitError(
                f"The refit lacks {len(missing)} of the model's tensors: {shown}{more}; {REMEDY}."
            )


def _ended() -> RefitError:
    return RefitError(
        "This refit is not open: it was not begun (RefitSession is a context manager), or has "
        "ended, e.g. by fp8rl_refit_abort or a sleep; begin a new one and send all tensors again."
    )


def _equals_live(model: torch.nn.Module, entry: Entry, tensor: torch.Tensor) -> bool:
    """Tell whether this rank's rows of a vocabulary tensor are what the engine holds."""
    path, _, leaf = entry.parameter.rpartition(".")
    module: Any = model.get_submodule(path)
    live = getattr(module, leaf).data
    first = module.shard_indices.org_vocab_start_index
    local = tensor[first : module.shard_indices.org_vocab_end_index]
    pairs = zip(parts(local), parts(live[: local.shape[0]]), strict=True)
    return all(torch.equal(ours.to(held), held) for ours, held in pairs)
