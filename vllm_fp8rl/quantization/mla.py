"""Multi-latent attention (MLA): vLLM's ``MLAAttention`` with weights that can be refitted.

Prefill multiplies latents with ``kv_b_proj``. Decode multiplies with two parts of its weight,
``W_UK_T`` and ``W_UV``, which vLLM takes out of it once, after loading. Where ``kv_b_proj`` is in
the model's dtype both parts are views of its weight, so that a refit changes them too. Where it is
in FP8 they are dequantized copies: :meth:`Fp8RLMLAMethod.derive` writes them again, in place,
before the first step after a load, so that captured graphs stay valid.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import dequantize_block
from vllm_fp8rl.quantization.kv_cache import INT8_KV_DTYPE, Fp8RLKVCacheMethod, check_kv_cache_dtype

_PACKS_WEIGHTS = ("AMX_MLA",)
"""Backends that keep ``kv_b_proj`` in a layout of their own and empty its weight."""
_CPU_LATENT = 576
"""The only latent size of vLLM's MLA kernel for CPUs: 512 and 64 of the rotary key."""


def check_latent_cache(kv_cache_dtype: str) -> None:
    """Raise UnsupportedError unless the latent cache is in the model's dtype.

    vLLM's decode kernels over an FP8 latent cache (FlashMLA's on Hopper) also quantize the query,
    after it was multiplied with ``W_UK_T``. Prefill does neither, and no trainer has that query.
    vLLM has no INT8 cache of latents.
    """
    if kv_cache_dtype == INT8_KV_DTYPE:
        raise UnsupportedError(
            f"Multi-latent attention has no KV cache of dtype '{kv_cache_dtype}'; set "
            "kv_cache.dtype to 'auto' in the recipe and start the engine with "
            "kv_cache_dtype='auto'."
        )
    if kv_cache_dtype == "fp8_ds_mla" or check_kv_cache_dtype(kv_cache_dtype):
        raise UnsupportedError(
            "An FP8 cache of multi-latent attention is not served: vLLM's decode kernels then "
            "quantize the absorbed query with one scale that no trainer observes, and prefill "
            "does not, so that the trainer cannot follow the rollout. Set kv_cache.dtype to 'auto' "
            "in the recipe and start the engine with kv_cache_dtype='auto'."
        )


def check_cpu(spec: ModelSpec) -> None:
    """Raise UnsupportedError for what vLLM's MLA computes wrongly on a CPU, or dies of.

    Call it while vLLM's current config is that of the engine.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    latent = spec.value("kv_lora_rank") + spec.value("qk_rope_head_dim")
    if latent != _CPU_LATENT:
        raise UnsupportedError(
            f"kv_lora_rank + qk_rope_head_dim is {latent}, but vLLM's MLA kernel for CPUs takes "
            f"{_CPU_LATENT} alone; run this model on a GPU."
        )
    if RotaryEmbedding.enabled():
        raise UnsupportedError(
            "vLLM's rotary kernel for CPUs gives wrong values for multi-latent attention; start "
            "the engine with compilation_config={'custom_ops': ['-rotary_embedding']}."
        )


class Fp8RLMLAMethod(Fp8RLKVCacheMethod):
    """The guard of an ``MLAAttention`` layer, and its parts of ``kv_b_proj`` after each load."""

    def create_weights(self, layer: Any) -> None:
        """Insert the guard; there is nothing to register for a cache in the model's dtype."""
        check_latent_cache(layer.kv_cache_dtype)
        backend = layer.attn_backend.get_name()
        if backend in _PACKS_WEIGHTS:
            raise UnsupportedError(
                f"Attention backend '{backend}' packs the weight of kv_b_proj where no refit "
                "reaches it; choose attention_backend='CPU_MLA'."
            )
        if getattr(layer, "dcp_q_replicate", False):
            raise UnsupportedError(
                "dcp_q_replicate keeps a gathered copy of kv_b_proj that no refit reaches; "
                "switch it off."
            )
        super().create_weights(layer)

    @torch.no_grad()
    def derive(self, layer: Any) -> None:
        """Let ``W_UK_T`` ``[heads, nope, latent]`` and ``W_UV`` ``[heads, latent, v]`` follow."""
        source = layer.kv_b_proj
        up_k, up_v = getattr(layer, "W_UK_T", None), getattr(layer, "W_UV", None)
        if up_k is None or up_v is None:
            raise UnsupportedError(
                f"'{layer.layer_name}' has no parts W_UK_T and W_UV of kv_b_proj in this vLLM, "
                "which a refit must reach; choose another attention backend."
            )
        if hasattr(source, "weight_scale_inv"):
            codes, scale_inv = source.weight.data, source.weight_scale_inv.data
            weight = dequantize_block(codes, scale_inv, dtype=up_v.dtype)[:, : layer.kv_lora_rank]
            by_head = weight.view(layer.num_heads, -1, layer.kv_lora_rank)
            up_k.data.copy_(by_head[:, : layer.qk_nope_head_dim])
            up_v.data.copy_(by_head[:, layer.qk_nope_head_dim :].transpose(1, 2))
        elif not (_shares_memory(up_k, source.weight) and _shares_memory(up_v, source.weight)):
            raise UnsupportedError(
                f"'{layer.layer_name}': W_UK_T and W_UV are no views of kv_b_proj's weight in this "
                "vLLM, so that a refit would not reach them; put kv_b_proj into FP8 (pins.fp8), or "
                "use a release of vLLM that docs/versions.md lists."
            )


def _shares_memory(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
