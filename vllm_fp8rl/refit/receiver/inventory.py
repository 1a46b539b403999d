"""`Inventory`: the tensors that a live vLLM model takes, and where each of them goes.

For every HF name it knows shape, kind and engine parameter, and a *route*: a function that writes
the tensor. A route is a block grid with its :class:`~vllm_fp8rl.storage.block_grid.Shard`, an
expert matrix of a layer, or a plain parameter. It is computed once, from the layers' names,
``packed_modules_mapping`` and the layers' geometry. Names without a route are left to vLLM's
``model.load_weights``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.kv_scales import ROLES, parse_scale_name, scale_name
from fp8rl.models.families import FUSED, SPANS, kind_of, tower_of
from fp8rl.models.pins import layer_of
from fp8rl.numerics import BLOCK, cdiv
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv.scales import fp8_layers, required_kv_scales
from vllm_fp8rl.refit.receiver.derived import require_nothing_derived
from vllm_fp8rl.refit.tensor_stream import Named
from vllm_fp8rl.storage.block_grid import SOURCE_DTYPES, Shard, WriteBatch
from vllm_fp8rl.storage.experts import MATRICES, ExpertGrids, ExpertParameter, load_fused, stack_of
from vllm_fp8rl.storage.parameters import Fp8Parameter, Fp8Scale, Fp8Weight, ShardedParameter

Kind = Literal["codes", "scales", "plain", "fused"]
Route = Callable[[torch.Tensor, WriteBatch], None]
"""Writes a whole HF tensor, or lets the batch do so later."""

_OF_LINEARS = ("weight", "weight_scale_inv", "bias")
_SMALL = 1 << 20  # elements; larger copies are made at once, not together


class Entry(NamedTuple):
    """One tensor of the HF checkpoint."""

    shape: tuple[int, ...]
    parameter: str
    """Engine parameter that holds it, perhaps fused with others."""
    kind: Kind
    """codes: an FP8 weight, may come as BF16; scales: its ``weight_scale_inv``; fused: one tensor
    for all that it ``covers``; plain: the rest."""
    route: Route | None
    """None where only vLLM's loader knows what to do."""
    alias_of: str | None = None
    """HF name of the tensor that this one is tied to; it need not be sent, and has no route."""
    covers: tuple[str, ...] = ()
    """HF names of the tensors that this one may come instead of."""
    local: bool = True
    """Whether this rank holds a part of it: an expert may be on another rank."""
    codes_fit: bool = True
    """Whether FP8 codes would keep their values: blocks of the HF tensor are this rank's blocks."""

    @property
    def required(self) -> bool:
        return self.kind not in ("scales", "fused") and self.alias_of is None


class Inventory:
    """What a refit must bring, and where it goes.

    Raises:
        UnsupportedError: the engine serves LoRA adapters, or see
            :func:`~vllm_fp8rl.refit.receiver.derived.require_nothing_derived`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        _refuse_adapters(model)
        require_nothing_derived(model)
        self._model = weakref.ref(model)
        self.entries = dict(entries_of(model))
        """By HF name, for every parameter of the model but its KV-cache scales."""
        self.required = tuple(name for name, entry in self.entries.items() if entry.required)
        """Names that must come, alone or in a fused tensor."""
        unrouted = {name: entry for name, entry in self.entries.items() if entry.route is None}
        tied = {entry.alias_of for entry in unrouted.values() if entry.alias_of is not None}
        self.special = unrouted.keys() | tied
        """Names of tensors without a route, and of those that others are tied to."""
        self.whole = _is_whole(model)
        """Whether this is all of the engine's model, and not a part of it."""
        self.kv_scales = frozenset(required_kv_scales(model))
        """Names on the wire of the KV scales that generation needs."""
        self._scales = {
            (state.index, role): Entry(
                (),
                f"{layer.layer_name}.{role}_scale",
                "plain",
                partial(_load_kv_scale, getattr(layer, f"{role}_scale")),
                covers=(f"{layer.layer_name}.{role}_scale",),  # it has two names on the wire
            )
            for layer, state in fp8_layers(model)
            for role in ROLES
        }
        self._held = {
            f"{path}.{leaf}": (module._parameters, leaf, parameter)
            for path, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        }
        self._towers = {tower_of(name) for name in self.entries}
        self._mapper = getattr(type(model), "hf_to_vllm_mapper", None)
        self._mtp_layers = state_of(model).spec.mtp_layers
        owners = (getattr(parameter, "grid", None) for _, _, parameter in self._held.values())
        grids = {id(grid): grid for grid in owners if hasattr(grid, "forget_unpaired")}
        self.grids: tuple[Any, ...] = tuple(grids.values())
        """What writes the FP8 parameters, each once."""

    @classmethod
    def of(cls, model: torch.nn.Module, names: Sequence[str] = ()) -> Inventory:
        """Return the model's inventory, made again for another model or a replaced parameter.

        Parameters of these HF names are looked at; without names all of the model's.
        """
        state = state_of(model)
        kept: Inventory | None = state.inventory
        if kept is None or kept._model() is not model or not kept._is_current(names):
            state.inventory = cls(model)
        return state.inventory

    def _is_current(self, names: Sequence[str]) -> bool:
        entries = [self._find(name) for name in names]
        held = [self._held.get(entry.parameter) for entry in entries if entry is not None]
        if not names or len(held) < len(names) or None in held:
            held = list(self._held.values())
        return all(h is not None and h[0].get(h[1]) is h[2] for h in held)

    def kv_scales_among(self, parameters: Collection[str]) -> set[str]:
        """Return the names on the wire of KV scales, by the engine parameters of a load."""
        return {
            scale_name(*key) for key, each in self._scales.items() if each.parameter in parameters
        }

    def leaves_out(self, name: str) -> bool:
        """Tell whether the engine has no place for a tensor, by its own choice.

        Those are the tensors of a tower that it was started without (``limit_mm_per_prompt`` 0 for
        all that the tower reads), those of layers for multi-token prediction, and others that
        vLLM's model class drops.
        """
        if name in self.entries:
            return False
        if layer_of(name) in self._mtp_layers:
            return True
        dropped = self._mapper is not None and self._mapper._map_name(name) is None
        return dropped or tower_of(name) not in self._towers | {None}

    def routes(self, names: Sequence[str]) -> bool:
        """Tell whether a batch of these names can be written by :meth:`write`.

        Each has a route then, and no two of them are for the same rows.
        """
        covered: list[str] = []
        for name in names:
            entry = self._find(name)
            if entry is None or entry.route is None:
                return False
            covered.extend(entry.covers or (name,))
        return len(covered) == len(set(covered))

    def write(self, tensors: Iterable[Named], came: list[str]) -> set[str]:
        """Write a batch of whole HF tensors into the live weights.

        Args:
            tensors: HF-named tensors for which :meth:`routes` holds; they must keep their values
                until this returns.
            came: takes each name before anything of its tensor can be written.

        Returns:
            Names of the engine parameters that this rank has written to.
        """
        batch, written = WriteBatch(), set()
        # vLLM's parameter classes pass every attribute through Python, to no effect.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for name, tensor in tensors:
                entry = self.entries.get(name) or self._find(name)
                assert entry is not None and entry.route is not None
                came.append(name)
                entry.route(tensor, batch)
                if entry.local:
                    written.add(entry.parameter)
            batch.run()
        return written

    def _find(self, name: str) -> Entry | None:
        """Return the entry of a tensor, KV scales included."""
        entry = self.entries.get(name)
        if entry is None:
            parsed = parse_scale_name(name)
            entry = None if parsed is None else self._scales.get(parsed)
        return entry


def require_fit(name: str, tensor: torch.Tensor, entry: Entry, model: torch.nn.Module) -> None:
    """Check a tensor of a plain load for a parameter of vLLM's own.

    Its loaders cast whatever comes, and refuse a shape by an assertion without words. Parameters of
    this package check both themselves.

    Raises:
        RefitError: a dtype that is neither a source's nor the parameter's own, or another shape.
    """
    if entry.kind != "plain":
        return
    one = tensor.numel() == math.prod(entry.shape) == 1
    fits = entry.route is None or tensor.shape == entry.shape or one
    if fits and tensor.dtype in SOURCE_DTYPES:
        return
    parameter = model.get_parameter(entry.parameter)
    if isinstance(parameter, (ShardedParameter, ExpertParameter)):
        return
    if tensor.dtype not in (*SOURCE_DTYPES, parameter.dtype):
        raise RefitError(f"'{name}' has dtype {tensor.dtype}; send bfloat16, float16 or float32.")
    if not fits:
        raise RefitError(
            f"'{name}' has shape {tuple(tensor.shape)}, but the engine's model has {entry.shape}; "
            "send the whole HF tensor."
        )


def _refuse_adapters(model: torch.nn.Module) -> None:
    """Refuse a model whose layers vLLM has wrapped for adapters: its loaders do not find them."""
    if any(path.endswith(".base_layer") for path, _ in model.named_modules()):
        raise UnsupportedError(
            "The engine was started with enable_lora: its base weights stay as they are, and only "
            "adapters are exchanged (lora_request of generate); start it without enable_lora to "
            "refit weights."
        )


def require_one_stage() -> None:
    """Raise UnsupportedError on a pipeline-parallel engine, whose ranks hold parts of the model."""
    if get_pp_group().world_size > 1:
        raise UnsupportedError(
            "A refit of a pipeline-parallel engine is not supported; use tensor_parallel_size."
        )


def _is_whole(model: torch.nn.Module) -> bool:
    """Tell whether the layers' paths are their names in the engine."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if path and path in (getattr(module, "layer_name", None), getattr(method, "name", None)):
            return True
    return False


def entries_of(model: torch.nn.Module) -> Iterator[tuple[str, Entry]]:
    """Yield the tensors of a model by their HF names, KV scales not included."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names, shapes = state_of(model).hf_names, state_of(model).shapes
    owners: dict[int, str] = {}
    for path, module in _modules(model).items():
        if hasattr(module, "kv_cache_dtype"):
            continue  # an attention layer: its scales, and W_UK_T and W_UV of MLA, are no weights
        if isinstance(module, RoutedExperts):
            yield from _experts(path, module)
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            owner = owners.setdefault(id(parameter), name)
            whole = shapes.get(names.of(name))
            for own_name, entry in _tensors(name, module, parameter, fused, whole):
                tied = entry._replace(alias_of=names.of(owner), route=None)
                yield names.of(own_name), entry if owner == name else tied


def _tensors(
    name: str,
    module: torch.nn.Module,
    parameter: torch.nn.Parameter,
    fused: dict[str, list[str]],
    whole: tuple[int, ...] | None,
) -> Iterator[tuple[str, Entry]]:
    """Yield the HF tensors that make one parameter, with the engine's names of what precedes them.

    ``whole`` is the shape of the HF tensor by the table of families; None where that has none.
    """
    # A router may have a bias for each expert beside its weight, which is a plain parameter.
    module_name, _, leaf = name.rpartition(".")
    if kind_of(module_name) == "conv1d":
        conv: Any = module  # whose weight vLLM may keep packed
        shape: tuple[int, ...] = (conv.output_size, 1, conv.input_size)
        yield name, Entry(shape, name, "plain", partial(_by_loader, parameter, ()))
    elif isinstance(module, LinearBase) and leaf in _OF_LINEARS:
        yield from _linear(name, module, parameter, fused)
    elif isinstance(module, VocabParallelEmbedding):
        rows = (module.org_vocab_size, *parameter.shape[1:])
        yield name, Entry(rows, name, "plain", partial(_by_loader, parameter, ()))
    else:
        shape = tuple(parameter.shape)
        route: Route | None = partial(_copy, parameter)
        if hasattr(parameter, "weight_loader"):  # this rank may hold a part
            no_module = whole is not None and leaf != "weight"
            route = partial(_by_loader, parameter, ()) if no_module else None
            shape = whole or shape
        yield name, Entry(shape, name, "plain", route)


def _modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every module by its path; a vocabulary matrix by each of its paths.

    Up to vLLM 0.27.1 a tied ``lm_head`` is the module ``embed_tokens`` itself.
    """
    modules = dict(model.named_modules())
    for path, parent in list(modules.items()):
        for leaf, child in parent._modules.items():
            if isinstance(child, VocabParallelEmbedding):
                modules.setdefault(f"{path}.{leaf}" if path else leaf, child)
    return modules


def _linear(
    name: str, module: LinearBase, parameter: torch.nn.Parameter, fused: dict[str, list[str]]
) -> Iterator[tuple[str, Entry]]:
    """Yield the HF tensors that make one parameter of a linear layer, in the order of its rows."""
    path, _, leaf = name.rpartition(".")
    parent, _, module_leaf = path.rpartition(".")
    kind: Kind = "plain"
    if isinstance(parameter, Fp8Parameter):
        kind = "codes" if isinstance(parameter, Fp8Weight) else "scales"
    # vLLM's own table of a class may lack gate_up_proj where no layer of the config is dense.
    parts = fused.get(module_leaf) or FUSED.get(module_leaf) or [module_leaf]
    rows, shard_ids = zip(*_matrices(module), strict=True)
    spans = [SPANS.get(part, 1) for part in parts]
    if sum(spans) != len(rows):  # fused in the checkpoint too, with blocks of its own
        shape = _shape(leaf, sum(rows), module.input_size)
        yield f"{path}.{leaf}", Entry(shape, name, kind, None, codes_fit=kind == "plain")
        return
    sharded = parameter if isinstance(parameter, ShardedParameter) else None
    matrices = iter(range(len(rows)))
    for index, (part, span) in enumerate(zip(parts, spans, strict=True)):
        route: Route | None = None
        fits, total, pieces = True, 0, []
        for number in islice(matrices, span):
            if sharded is not None and len(sharded.partitions) == len(rows):
                start, local_rows = sharded.partitions[number]
                shard = sharded.shard(start, local_rows, (rows[number], module.input_size))
                pieces.append(_Piece(total, shard))
                if isinstance(sharded, Fp8Parameter):
                    origin = (total + shard.origin[0], shard.origin[1])
                    fits = fits and sharded.grid.codes_fit(start, origin)
            total += rows[number]
        if sharded is None and span == 1:  # a bias, or a router
            route = partial(_by_loader, parameter, shard_ids[index])
        elif sharded is not None and pieces:
            route = partial(_store, sharded, pieces)
        shape = _shape(leaf, total, module.input_size)
        yield (
            ".".join(filter(None, (parent, part, leaf))),
            Entry(shape, name, kind, route, codes_fit=fits),
        )


class _Piece(NamedTuple):
    """Rows of an HF weight, from ``first`` on, that make one matrix of a fused layer."""

    first: int
    shard: Shard
    """Where the matrix lies on this rank, and in these rows."""


def _store(
    parameter: ShardedParameter, pieces: Sequence[_Piece], tensor: torch.Tensor, batch: WriteBatch
) -> None:
    """Route of a weight, or of its scales, that fills one or more matrices of a layer."""
    if len(pieces) == 1:
        parameter.store(pieces[0].shard, tensor, batch)
        return
    block = BLOCK[0] if isinstance(parameter, Fp8Scale) else 1
    for row, shard in pieces:
        first = row // block
        parameter.store(shard, tensor[first : first + cdiv(shard.full[0], block)], batch)


def _experts(path: str, module: RoutedExperts) -> Iterator[tuple[str, Entry]]:
    """Yield the tensors of a layer's experts, of every rank: each by itself, and all in one."""
    experts = module.w13_weight.grid
    layout, quantized = experts.layout, isinstance(experts, ExpertGrids)
    kind: Kind = "codes" if quantized else "plain"
    for matrix in MATRICES:
        parameter = f"{path}.{stack_of(matrix)}"
        shape, fits = layout.shard(matrix).full, layout.codes_fit(matrix)
        scales = (cdiv(shape[0], BLOCK[0]), cdiv(shape[1], BLOCK[1]))
        for expert in range(layout.total):
            name, local = layout.hf_name(expert, matrix), expert in layout.local
            route = partial(experts.load, expert, matrix) if local else _leave_out
            yield name, Entry(shape, parameter, kind, route, local=local, codes_fit=fits)
            if quantized:
                route = partial(experts.load_scales, expert, matrix) if local else _leave_out
                stack = f"{parameter}_scale_inv"
                entry = Entry(scales, stack, "scales", route, local=local, codes_fit=fits)
                yield f"{name}_scale_inv", entry
    for leaf, matrices in layout.fused.items():
        rows, columns = layout.shard(matrices[0]).full
        shape = (layout.total, len(matrices) * rows, columns)
        names = tuple(layout.hf_name(e, matrix) for matrix in matrices for e in range(layout.total))
        stack, route = f"{path}.{stack_of(matrices[0])}", partial(load_fused, experts, leaf)
        yield f"{layout.name}.{leaf}", Entry(shape, stack, "fused", route, covers=names)


def _leave_out(tensor: torch.Tensor, batch: WriteBatch) -> None:
    """Route of an expert that another rank holds."""


def _copy(parameter: torch.nn.Parameter, tensor: torch.Tensor, batch: WriteBatch) -> None:
    """Route of a parameter without a loader, such as a norm's weight."""
    alike = (
        tensor.shape == parameter.shape
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.numel() <= _SMALL
    )
    if alike:
        batch.copy(parameter.data, tensor)
    else:
        default_weight_loader(parameter, tensor)


def _by_loader(
    parameter: Any, shard_id: tuple[Any, ...], tensor: torch.Tensor, batch: WriteBatch
) -> None:
    """Route through the parameter's own loader, as vLLM calls it."""
    parameter.weight_loader(parameter, tensor, *shard_id)


def _load_kv_scale(parameter: Any, tensor: torch.Tensor, batch: WriteBatch) -> None:
    """Route of a KV scale in a plain load; a refit sets its scales at the end."""
    parameter.weight_loader(parameter, tensor, fill=batch.fill)


def _matrices(module: LinearBase) -> list[tuple[int, tuple[Any, ...]]]:
    """List the rows of each HF weight in a linear layer, and its arguments for vLLM's loader."""
    if isinstance(module, QKVParallelLinear):
        heads = {"q": module.total_num_heads}
        heads |= dict.fromkeys("kv", module.total_num_kv_heads)
        return [(count * module.head_size, (role,)) for role, count in heads.items()]
    if isinstance(module, MergedColumnParallelLinear):
        return [(rows, (index,)) for index, rows in enumerate(module.output_sizes)]
    return [(module.output_size, ())]


def _shape(leaf: str, rows: int, columns: int) -> tuple[int, ...]:
    if leaf == "weight_scale_inv":
        return cdiv(rows, BLOCK[0]), cdiv(columns, BLOCK[1])
    return (rows,) if leaf == "bias" else (rows, columns)
