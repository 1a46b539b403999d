"""Build a Megatron-Core GPTModel with the local spec from a Hugging Face config.

The local spec needs neither Transformer Engine nor apex, so the model runs on a CPU. The demo and
the tests use it; on GPUs take the model from Megatron-LM, Megatron-Bridge or NeMo RL.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from fp8rl.errors import UnsupportedError
from megatron_fp8rl import compat
from megatron_fp8rl.testing import gated_delta_net
from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG

_LATENT = ("deepseek_v2", "deepseek_v3")
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", *_LATENT, *gated_delta_net.MODEL_TYPES)


class LatentDotProductAttention(DotProductAttention):
    """Megatron's local attention with a width of its own for values, for multi-latent attention.

    Args:
        config: as upstream.
        *args: as upstream.
        k_channels: width of a key head; the query has it too.
        v_channels: width of a value head, which is that of an output head.
        **options: as upstream.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)
        if v_channels is not None:
            heads = self.num_attention_heads_per_partition
            self.hidden_size_per_partition = v_channels * heads


def build_gpt(
    hf_config: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    seed: int = 0,
    transformer_layer_spec: Any = None,
    core_attention: type | None = None,
    **overrides: Any,
) -> GPTModel:
    """A model of one of ``MODEL_TYPES`` with all parameters in ``dtype``.

    Tensor and pipeline sizes come from ``megatron.core.parallel_state``, which must be initialised.
    Initial weights depend on ``seed`` and, under pipeline parallelism, on the stage; load weights
    with :func:`megatron_fp8rl.export.load_hf` where topologies must agree.

    Args:
        hf_config: a transformers config of a language model.
        dtype: bfloat16 or float32.
        pre_process: this chunk holds the embedding.
        post_process: this chunk holds the final norm and the output projection.
        vp_stage: chunk number under virtual pipelining, else None.
        seed: seed of the initial weights; the caller's random state is left as it was.
        transformer_layer_spec: spec that takes the place of megatron's local one.
        core_attention: class that takes the place of ``DotProductAttention`` in a dense model.
        **overrides: fields of ``TransformerConfig`` that differ from the defaults here, such as
            ``mtp_num_layers``.

    Raises:
        UnsupportedError: the config asks for something that this builder cannot express.
    """
    config = transformer_config(hf_config, dtype=dtype, **overrides)
    tensor_parallel = config.tensor_model_parallel_size
    spec = transformer_layer_spec or _local_spec(config, vp_stage)
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    mtp_spec = None
    if config.mtp_num_layers and post_process:
        mtp_spec = get_gpt_mtp_block_spec(
            config, _layer_spec(config), use_transformer_engine=False, vp_stage=vp_stage
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=-(-hf_config.vocab_size // tensor_parallel) * tensor_parallel,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            rotary_percent=_rope(hf_config).get("partial_rotary_factor", 1.0),
            rotary_base=_rope_theta(hf_config),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            mtp_block_spec=mtp_spec,
            vp_stage=vp_stage,
        )
    return model.to(dtype)  # torch norms are made in float32 whatever params_dtype says


def _local_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    hybrid = any(compat.linear_attention_layers(config))
    if config.num_moe_experts is None and not hybrid:
        return _layer_spec(config)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    if config.multi_latent_attention:
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = LatentDotProductAttention
            if config.q_lora_rank is None:  # 0.16.1 ignores the norm, 0.20 refuses it
                attention.q_layernorm = IdentityOp
    return gated_delta_net.hybrid_spec(spec, config) if hybrid else spec


def _layer_spec(config: TransformerConfig) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )


def transformer_config(
    hf_config: Any, *, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> TransformerConfig:
    """The Megatron config of :func:`build_gpt`.

    Raises:
        UnsupportedError: the config asks for something that this builder cannot express.
    """
    _check_supported(hf_config, dtype)
    heads = hf_config.num_attention_heads
    fields: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": getattr(hf_config, "intermediate_size", None),
        "num_attention_heads": heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "qk_layernorm": hf_config.model_type in ("qwen3", "qwen3_moe"),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": _all_biased(hf_config),
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "init_method_std": hf_config.initializer_range,
        "transformer_impl": "local",
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    if hf_config.model_type in gated_delta_net.MODEL_TYPES:
        fields |= gated_delta_net.config_fields(hf_config)
    if hf_config.model_type == "qwen3_moe":
        fields |= _moe_fields(hf_config)
    if hf_config.model_type not in _LATENT:
        return TransformerConfig(**{**CPU_CONFIG, **fields, **overrides})
    fields |= _latent_fields(hf_config) | _deepseek_moe_fields(hf_config)
    return MLATransformerConfig(**{**CPU_CONFIG, **fields, **overrides})


def _latent_fields(hf_config: Any) -> dict[str, Any]:
    return {
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "kv_channels": hf_config.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": _rope_theta(hf_config),
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }


def _deepseek_moe_fields(hf_config: Any) -> dict[str, Any]:
    sigmoid = hf_config.model_type == "deepseek_v3"
    if hf_config.norm_topk_prob is not sigmoid:
        raise UnsupportedError(
            "Megatron divides the chosen scores by their sum with a sigmoid and not with a "
            f"pre-softmax; set norm_topk_prob to {sigmoid}."
        )
    grouped = (hf_config.n_group or 1) > 1
    if grouped and hf_config.num_experts_per_tok != 2 * hf_config.topk_group:
        raise UnsupportedError(
            "Megatron scores a group by its best num_experts_per_tok // topk_group experts, "
            "transformers by its best two; set num_experts_per_tok to twice topk_group."
        )
    sparse = [i >= hf_config.first_k_dense_replace for i in range(hf_config.num_hidden_layers)]
    return {
        "num_moe_experts": hf_config.n_routed_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_layer_freq": [int(flag) for flag in sparse],
        "moe_shared_expert_intermediate_size": (
            hf_config.n_shared_experts * hf_config.moe_intermediate_size
        ),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": hf_config.n_group if grouped else None,
        "moe_router_group_topk": hf_config.topk_group if grouped else None,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def _moe_fields(hf_config: Any) -> dict[str, Any]:
    if not hf_config.norm_topk_prob:
        raise UnsupportedError("norm_topk_prob=False is not served; set it to true.")
    dense = set(hf_config.mlp_only_layers)
    sparse = [
        number not in dense and (number + 1) % hf_config.decoder_sparse_step == 0
        for number in range(hf_config.num_hidden_layers)
    ]
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_layer_freq": [int(flag) for flag in sparse],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def _check_supported(hf_config: Any, dtype: torch.dtype) -> None:
    if hf_config.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"model_type '{hf_config.model_type}' has no builder; use one of "
            f"{', '.join(MODEL_TYPES)}."
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(f"dtype {dtype} is not served; use bfloat16 or float32.")
    if hf_config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act '{hf_config.hidden_act}' is not served; use 'silu'.")
    if getattr(hf_config, "use_sliding_window", False):
        raise UnsupportedError("use_sliding_window is not served; set it to false.")
    if _rope(hf_config).get("rope_type", "default") != "default":
        raise UnsupportedError(
            f"rope_type '{_rope(hf_config)['rope_type']}' is not served; use 'default'."
        )
    if hf_config.model_type != "qwen2" and getattr(hf_config, "attention_bias", False) != getattr(
        hf_config, "mlp_bias", False
    ):
        raise UnsupportedError(
            "attention_bias and mlp_bias differ; Megatron has one switch for both, so set both or "
            "neither."
        )


def _all_biased(hf_config: Any) -> bool:
    return hf_config.model_type != "qwen2" and bool(getattr(hf_config, "attention_bias", False))


def _rope(hf_config: Any) -> dict[str, Any]:
    return getattr(hf_config, "rope_parameters", None) or {}


def _rope_theta(hf_config: Any) -> float:
    theta = _rope(hf_config).get("rope_theta")
    return theta if theta is not None else hf_config.rope_theta
