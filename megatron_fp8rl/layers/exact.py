"""Norm, rotation and attention by the kernels that the rollout calls too (``exact: true``).

Experts are in :mod:`megatron_fp8rl.layers.experts`.

FP8 linears, SwiGLU and embedding have the rollout's bits already. The classes of the modules change
as for FP8 linears (:class:`megatron_fp8rl.layers.linear.Fp8Module`), so that parameters, names,
hooks and checkpoints stay. Backward passes are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import REMEDY, head, implementation, reference, require_served_ranks
from fp8rl.kernels.rotary_table import cos_sin_table, inverse_frequencies
from fp8rl.numerics import fake_quantize_int8_kv, fake_quantize_kv
from megatron_fp8rl import compat
from megatron_fp8rl.layers.experts import ExactMoELayer, ExactRouter, check_experts, require_options
from megatron_fp8rl.layers.linear import Change, Fp8Module
from megatron_fp8rl.layers.norms import SharedRMSNorm
from megatron_fp8rl.layers.swiglu import requests_swiglu

_HOPPER = (9, 0)
_CONFIG: dict[str, Any] = {
    "multi_latent_attention": False,
    "context_parallel_size": 1,
    "window_size": None,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "fp32_residual_connection": False,
    "apply_residual_connection_post_layernorm": False,
    "apply_query_key_layer_scaling": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "fused_single_qkv_rope": False,
    "qk_clip": False,
    "should_pad_vocab": False,
    "use_mup": False,
    "log_max_attention_logit": False,
    "attention_output_gate": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "add_qkv_bias": False,
    "add_bias_linear": False,
}
"""Option of a config, and its only good value; a release without the option has no other."""
_NORM_GRADIENT = "_fused_rms_norm_backward"  # newer than the oldest torch that fp8rl takes


class ExactNorm(Fp8Module):
    """An RMS norm of Megatron's local layers, or TransformerEngine's."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` ``[.., hidden]`` in float32, rounded once."""
        module: Any = self
        return SharedRMSNorm.apply(x, module.weight, module.eps)


class ExactColumnParallelLinear(Fp8Module, ColumnParallelLinear):
    """The output projection: on a GPU in products of one size, on a CPU in float64."""

    upstream_class = ColumnParallelLinear

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *args: Any,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if input.is_cpu:
            if sequence_parallel:
                input = gather_from_sequence_parallel_region(input, group=tp_group)
            elif allreduce_dgrad:
                input = copy_to_tensor_model_parallel_region(input, group=tp_group)
            return reference.multiply(input, weight)
        blocks = _HeadInBlocks()
        with blocks:  # upstream's backward stays
            y = super()._forward_impl(
                input.contiguous(),
                weight,
                *args,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **kwargs,
            )
        if blocks.products != 1:
            raise UnsupportedError(
                "exact cuts the product of Megatron's output projection into blocks, and this "
                f"version multiplies {blocks.products} times by torch.mm; use one that "
                f"docs/versions.md names, {REMEDY}"
            )
        return y


class _HeadInBlocks(TorchDispatchMode):
    """Multiply by :func:`fp8rl.kernels.head.multiply` wherever torch multiplies two matrices."""

    products = 0
    """How often it has."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self.products += 1
            return head.multiply(*args)
        return func(*args, **(kwargs or {}))


class ExactSelfAttention(Fp8Module, SelfAttention):
    """Self-attention that rotates queries and keys by the shared kernel, as they are made.

    So ``core_attention`` and its observers see them rotated, as before.
    """

    upstream_class = SelfAttention
    exact_rotation: Rotation
    exact_packed: Any = None
    """``packed_seq_params`` of the forward that is running."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run upstream's forward, which has nothing left to rotate.

        Raises:
            UnsupportedError: Megatron's own inference, whose positions are not seen here.
        """
        if any(kwargs.get(key) is not None for key in ("inference_context", "inference_params")):
            raise UnsupportedError(
                "exact does not serve Megatron's own inference, whose tokens start at later "
                f"positions; sample with the rollout engine, {REMEDY}"
            )
        self.exact_packed = packed_seq_params
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=None,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        finally:
            del self.exact_packed

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return upstream's query, key and value ``[s, b, heads, head_size]``, rotated."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        positions, table = self.exact_rotation.at(query, self.exact_packed)
        query, key = _Rotated.apply(query, key, positions, table)
        return query, key, value

    def give_back(self) -> None:
        self.__dict__.pop("exact_rotation", None)
        super().give_back()


class Rotation:
    """The table of cosines and sines of a model, made once and as long as its longest sequence.

    Args:
        inverse: :func:`fp8rl.kernels.rotary_table.inverse_frequencies` of the model.
    """

    def __init__(self, inverse: Tensor) -> None:
        self._inverse = inverse
        self._table: Tensor | None = None

    def at(self, query: Tensor, packed: Any) -> tuple[Tensor, Tensor]:
        """Return the positions of the tokens of ``query`` ``[s, b, ..]``, and the table."""
        length, batch = query.shape[:2]
        positions = torch.arange(length, device=query.device)
        if packed is not None:
            starts = _starts_of(packed).long()
            sequence = torch.searchsorted(starts, positions, right=True) - 1
            positions = positions - starts[sequence]
        if self._table is None or len(self._table) < length or self._table.device != query.device:
            with torch.inference_mode(False):  # a backward pass will need it too
                self._table = cos_sin_table(self._inverse, length, query.device)
        return positions.repeat_interleave(batch), self._table


class OfForward:
    """What the host asks the device about a forward: asked once, for all layers."""

    def __init__(self) -> None:
        self._mask = _Last()
        self._starts = _Last()

    def is_causal(self, mask: Tensor, length: int) -> bool:
        """Tell whether a mask of ``length`` tokens hides what comes later, and nothing else."""
        if mask.dtype != torch.bool or mask.shape[-2:] != (length, length):
            return False
        return self._mask.known(mask, _hides_what_comes_later)

    def longest(self, packed: Any) -> int:
        """Return the tokens of the longest packed sequence, its padding included."""
        if packed.cu_seqlens_q_padded is None and packed.max_seqlen_q is not None:
            return int(packed.max_seqlen_q)
        # max_seqlen_q may leave the padding out.
        return self._starts.known(_starts_of(packed), lambda starts: int(starts.diff().max()))


class _Last:
    """The answer of a function for the last tensor; recomputed layers get it detached."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._found: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Last, ()  # a copied weak reference would be freed twice

    def known(self, tensor: Tensor, find: Callable[[Tensor], Any]) -> Any:
        """Return ``find(tensor)``."""
        if tensor.is_inference():  # has no version, by which a change in place would show
            return find(tensor)
        # The weak reference keeps no memory, but the identity of the storage.
        storage = StorageWeakRef(tensor.untyped_storage())
        shape = tensor.storage_offset(), tensor.shape, tensor.stride()
        key = storage, *shape, tensor._version
        if key != self._key:
            self._key, self._found = key, find(tensor)
        return self._found


def _hides_what_comes_later(mask: Tensor) -> bool:
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return bool((mask == later).all())


class ExactCore(Fp8Module):
    """``core_attention`` over keys and values as the rollout's cache holds them.

    For a cache of 8 bits :class:`megatron_fp8rl.kv.cache.KVCacheInTraining` puts it into service;
    until that has scales, upstream's attention runs over K and V in 16 bits. With
    ``kv_cache.dtype`` ``auto`` it is in service from the start.
    """

    exact_forward: OfForward
    exact_cache: Any = None
    """The :class:`~fp8rl.training.kv.LayerCache` of the layer; None before and after,
    and for a cache of 16 bits."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute causal attention.

        Args:
            query: ``[s, b, heads, head_size]``, or ``[tokens, heads, head_size]`` if packed.
            key, value: like ``query``, with KV heads.
            attention_mask: None, which means the causal one, or the causal one ``[.., s, s]``, as
                NeMo RL gives it where it does not pack.
            attn_mask_type: ``causal``; packed sequences may have ``padding_causal``, whose padding
                is at the end of each.

        Returns:
            ``[s, b, heads * head_size]``, or ``[tokens, heads * head_size]`` if packed, with zeros
            for tokens behind the last sequence.

        Raises:
            UnsupportedError: another mask, or a bias; over 8 bits no ``KVCacheInTraining``.
        """
        layer = self.exact_cache
        if layer is None and self.fp8_setup.recipe.kv_cache.dtype != "auto":
            raise UnsupportedError(
                "exact needs to know the rollout's KV cache, and this model has none; after "
                "convert(model, recipe) make KVCacheInTraining(model, recipe.kv_cache.dtype) (an "
                f"earlier one must be closed), {REMEDY}"
            )
        if layer is not None and not layer.in_service:
            return super().forward(  # type: ignore[misc]
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )
        packed = packed_seq_params is not None
        kinds = [AttnMaskType.causal, *([AttnMaskType.padding_causal] if packed else [])]
        if attn_mask_type not in kinds or attention_bias is not None:
            raise UnsupportedError(
                f"exact computes causal attention, and this layer has attn_mask_type "
                f"{attn_mask_type} and {'no' if attention_bias is None else 'an'} attention_bias; "
                f"build the model with AttnMaskType.causal and give no bias, {REMEDY}"
            )
        if attention_mask is not None and (
            packed or not self.exact_forward.is_causal(attention_mask, len(query))
        ):
            raise UnsupportedError(
                "exact computes causal attention, and attention_mask is not the causal one; give "
                f"None, and packed_seq_params for several sequences in a row, {REMEDY}"
            )
        if layer is not None:
            layer.count(key, value)
        if not packed:
            # Sequences of one length are one sequence with the heads of all.
            length = len(query)
            starts = torch.arange(2, dtype=torch.int32, device=query.device) * length
            q, k, v = (x.flatten(1, 2).contiguous() for x in (query, key, value))
        else:
            starts = _starts_of(packed_seq_params).to(torch.int32)
            length = self.exact_forward.longest(packed_seq_params)
            q, k, v = (x.contiguous() for x in (query, key, value))
        if query.is_cpu:
            out = _attend_on_cpu(q, k, v, starts, layer)
        else:
            out = _Attention.apply(q, k, v, starts, length, layer, packed)
        return out.reshape(*query.shape[:-2], -1)

    def give_back(self) -> None:
        self.__dict__.pop("exact_cache", None)
        self.__dict__.pop("exact_forward", None)
        super().give_back()


@cache
def exact_class(ours: Any, upstream: Any) -> type[Fp8Module]:
    """Return the class that a module of class ``upstream`` gets: ``ours`` in front of it."""
    return type(f"Exact{upstream.__name__}", (ours, upstream), {"upstream_class": upstream})


def plan(chunks: Iterable[Any]) -> list[Change]:
    """List what a conversion with ``exact`` changes besides linears.

    Raises:
        UnsupportedError: a place whose bits would not be the rollout's; nothing has been changed.
    """
    found: list[Change] = []
    for chunk in chunks:
        rotation, forward = _checked(chunk), OfForward()
        for name, norm in chunk.decoder.named_modules():
            if not name.endswith("layernorm") or not list(norm.parameters(recurse=False)):
                continue
            if type(norm) not in compat.rms_norms():
                raise UnsupportedError(
                    f"exact needs torch's or TransformerEngine's RMSNorm at 'decoder.{name}', not "
                    f"{type(norm).__module__}.{type(norm).__name__}; build the model with "
                    f"Megatron's local spec or its TransformerEngine spec, {REMEDY}"
                )
            found.append((norm, exact_class(ExactNorm, type(norm)), {}))  # type: ignore[arg-type]
        if chunk.post_process:
            output = chunk.output_layer
            if type(output) is not ColumnParallelLinear:
                raise UnsupportedError(
                    f"exact needs Megatron's ColumnParallelLinear at 'output_layer', not "
                    f"{type(output).__name__}; leave the output projection in bfloat16, {REMEDY}"
                )
            found.append((output, ExactColumnParallelLinear, {}))
        for layer in chunk.decoder.layers:
            attention = layer.self_attention
            found.append((attention, ExactSelfAttention, {"exact_rotation": rotation}))
            core = attention.core_attention
            core_class: Any = exact_class(ExactCore, type(core))  # type: ignore[arg-type]
            found.append((core, core_class, {"exact_forward": forward}))
            if isinstance(layer.mlp, MoELayer):
                found.append((layer.mlp, ExactMoELayer, {}))
                found.append((layer.mlp.router, ExactRouter, {}))
    return found


def _checked(chunk: Any) -> Rotation:
    """Return the rotation of a GPTModel, or raise UnsupportedError for what is not exact."""
    config = chunk.config
    require_served_ranks("tensor_model_parallel_size", config.tensor_model_parallel_size)
    rope: Any = getattr(chunk, "rotary_pos_emb", None)
    for name, parameter in chunk.named_parameters():
        if parameter.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"exact needs bfloat16 parameters, as the rollout has, and '{name}' is "
                f"{parameter.dtype}; call model.bfloat16() or wrap the model in Float16Module (in "
                f"Megatron-Bridge set params_dtype to torch.bfloat16), {REMEDY}"
            )
    groups = config.num_query_groups % config.tensor_model_parallel_size
    interpolation = getattr(rope, "seq_len_interpolation_factor", None)
    require_options(
        [
            *((name, getattr(config, name, good), good) for name, good in _CONFIG.items()),
            ("num_query_groups % tensor_model_parallel_size", groups, 0),
            ("position_embedding_type", chunk.position_embedding_type, "rope"),
            ("rotary_percent", chunk.rotary_percent, 1),
            ("logit_dtype", getattr(chunk, "logit_dtype", None), None),
            ("seq_len_interpolation_factor", interpolation, None),
        ]
    )
    for layer in chunk.decoder.layers:
        if type(layer.self_attention) is not SelfAttention:
            raise UnsupportedError(
                f"exact needs Megatron's SelfAttention in layer {layer.layer_number - 1}, not "
                f"{type(layer.self_attention).__name__}; build the model with Megatron's local "
                f"spec or its TransformerEngine spec, {REMEDY}"
            )
        mlp = layer.mlp
        if isinstance(mlp, MoELayer):
            check_experts(mlp)
            mlp = mlp.experts
            if isinstance(mlp, SequentialMLP):
                mlp = mlp.local_experts[0]
        kinds = [MLP, TEGroupedMLP]
        if type(mlp) not in kinds or not requests_swiglu(mlp):
            raise UnsupportedError(
                f"exact needs a SwiGLU that is rounded once, as the rollout's is, and layer "
                f"{layer.layer_number - 1} has another; set config.bias_activation_fusion to true "
                f"and leave the other options of the activation as they are, {REMEDY}"
            )
    device = next(chunk.parameters()).device
    if device.type != "cpu":
        _check_kernels(device, config.kv_channels)
    elif config.num_moe_experts:
        raise UnsupportedError(f"exact needs a Hopper GPU for experts; use one, {REMEDY}")
    return Rotation(_frequencies(chunk))


def _check_kernels(device: torch.device, dim: int) -> None:
    """Raise UnsupportedError for a GPU or a head size that the kernels do not serve."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability != _HOPPER:
        raise UnsupportedError(
            f"exact needs a CPU or a Hopper GPU, of compute capability {_HOPPER}, in the trainer, "
            f"not {capability} ({device.type}); use one, {REMEDY}"
        )
    if not hasattr(torch.ops.aten, _NORM_GRADIENT):
        raise UnsupportedError(
            f"exact takes the gradients of norms on a GPU from torch's '{_NORM_GRADIENT}', and "
            f"torch {torch.__version__} has none; install a newer one, {REMEDY}"
        )
    from fp8rl.kernels.attention import HEAD_SIZES  # needs Triton

    if dim not in HEAD_SIZES:
        raise UnsupportedError(
            f"exact serves heads of {HEAD_SIZES}, not of {dim}; choose another model, {REMEDY}"
        )


def _frequencies(chunk: Any) -> Tensor:
    """Return ours, and raise UnsupportedError if a GPTModel's are not the same function."""
    base, dim = float(chunk.rotary_base), chunk.config.kv_channels
    theirs = chunk.rotary_pos_emb.inv_freq.double().cpu()
    ours = inverse_frequencies(base, dim)
    if chunk.rotary_scaling and len(theirs) == len(ours):
        # The model does not keep the factor; all of it is in the last frequency.
        factor = round(float(ours[-1] / theirs[-1]), 3)
        ours = inverse_frequencies(base, dim, factor)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-5, atol=0):
        raise UnsupportedError(
            "exact serves plain rotary embeddings and Llama 3's rope_scaling, and this model "
            f"has other frequencies; choose another model, {REMEDY}"
        )
    return ours


def _starts_of(packed: Any) -> Tensor:
    """Return int32 ``[sequences + 1]``, the first token of each packed sequence, and the end."""
    padded = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, positions: Tensor, table: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(positions, table)
        return _turned((query, key), positions, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_turned(grads, *ctx.saved_tensors, back=True), None, None


def _turned(
    heads: tuple[Tensor, ...], positions: Tensor, table: Tensor, *, back: bool = False
) -> tuple[Tensor, ...]:
    query, key = (x.flatten(0, 1) for x in heads)
    rotated = implementation(query, "rotary").rotate(query, key, positions, table, back=back)
    return tuple(y.view(x.shape) for x, y in zip(heads, rotated, strict=True))


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, layer: Any) -> Tensor:
    """Compute what :class:`_Attention` does, in torch and differentiated by it."""
    if layer is not None:
        key, value = layer.rounded(key, value)
    scale, sizes = query.shape[-1] ** -0.5, starts.diff().tolist()
    sizes.append(len(query) - sum(sizes))
    *sequences, behind = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
    parts = [reference.attend(q, k, v, scale) for q, k, v in sequences]
    return torch.cat([*parts, torch.zeros_like(behind[0])])


class _Attention(torch.autograd.Function):
    """Causal attention of sequences that lie one after the other.

    Gradients are those of a library's attention over the keys and values as ``layer``, a
    ``LayerCache`` or None for 16 bits, rounds them, and pass straight through the rounding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        longest: int,
        layer: Any,
        packed: bool,
    ) -> Tensor:
        from fp8rl.kernels.attention import Copy, attend, copy_tokens

        scale = query.shape[-1] ** -0.5
        if layer is None:  # a cache of 16 bits holds them as they are
            copy = Copy(key, value, None, None, starts[:-1], starts.diff())
        else:
            copy = copy_tokens(key, value, starts, longest=longest, scales=layer.scales)
        out, lse = attend(query, copy, starts, longest_query=longest, softmax_scale=scale)
        if layer is not None and layer.scales is None:
            key, value = fake_quantize_int8_kv(key, value)
        elif layer is not None:
            key, value = fake_quantize_kv(key, value, layer.scales, layer.clipped)
        ctx.save_for_backward(query, key, value, out, lse, starts)
        ctx.longest, ctx.scale, ctx.packed = longest, scale, packed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (*of_forward, starts) = grads[0].contiguous(), ctx.saved_tensors
        if not ctx.packed and _serves_cudnn(*of_forward[:3]):
            found = _cudnn_backward(grad, *of_forward, scale=ctx.scale)
        else:
            found = _flash_backward(
                grad, *of_forward, starts=starts, longest=ctx.longest, scale=ctx.scale
            )
        return (*found, None, None, None, None)


def _serves_cudnn(*rows: Tensor) -> bool:
    """Tell whether torch has gradients by cuDNN for one sequence's query, key and value."""
    query, key, value = (x.detach().transpose(0, 1)[None].requires_grad_() for x in rows)
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _cudnn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
) -> list[Tensor]:
    """Return gradients of one sequence's attention by cuDNN; torch makes one plan for each shape.

    Args:
        grad, query, key, value, out: ``[tokens, heads, head_size]``.
        lse: log-sum-exp of the scores, float32 ``[heads, tokens]``.
    """
    state = torch.zeros(1, dtype=torch.int64, device=query.device)  # of dropout: none
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(x.transpose(0, 1)[None] for x in (grad, query, key, value, out)),
        lse[None, :, :, None],
        state,
        state,
        None,
        None,
        None,
        len(query),
        len(query),
        0.0,
        True,
        scale=scale,
    )
    return [x[0].transpose(0, 1) for x in found]


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    starts: Tensor,
    longest: int,
    scale: float,
) -> list[Tensor]:
    """Return gradients of attention by FlashAttention 2 in torch, where cuDNN does not serve.

    Packed sequences are such a case: for several lengths torch's cuDNN makes a plan in every call.
    """
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout: none
    found = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        state,
        torch.empty(0, device=query.device),
        scale=scale,
    )
    behind = torch.arange(len(query), device=query.device) >= starts[-1]  # left uninitialised
    return [x.masked_fill_(behind[:, None, None], 0) for x in found[:3]]
