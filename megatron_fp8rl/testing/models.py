"""Build a Megatron-Core GPTModel with the local spec from a Hugging Face config.

The local spec needs neither Transformer Engine nor apex, so the model runs on a CPU. The demo and
the tests use it; on GPUs take the model from Megatron-LM, Megatron-Bridge or NeMo RL.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
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
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from fp8rl.errors import UnsupportedError
from fp8rl.kernels.rotary_table import LLAMA3
from fp8rl.models.families import (
    ARCEE,
    COHERE,
    ERNIE4_5,
    EXAONE4,
    EXPERTS,
    GEMMA2,
    GEMMA3,
    LLAMA_LIKE,
    OLMO2,
    SEED_OSS,
    Experts,
    Family,
    Module,
)
from fp8rl.models.spec import ModelSpec
from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG

_READ = frozenset(
    (
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
        *("max_position_embeddings", "initializer_range", "tie_word_embeddings", "layer_types"),
        *("rope_parameters", "rope_theta", "partial_rotary_factor", "rope_interleave"),
        *("attention_bias", "qkv_bias", "mlp_bias", "use_qk_norm"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"),
        *("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"),
        *("topk_method", "scoring_func"),
        *("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "mlp_layer_types"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    )
)
"""Keys of a config that the built model follows, where the config's class has them."""
_OF_EVERY_CLASS = ("head_dim", "intermediate_size", "topk_method", "scoring_func")
"""Keys that count, or are checked, where the config's class does not have them, too."""
_WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("_name_or_path", "tokenizer_class", "id2label", "label2id", "problem_type"),
        *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
        *("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"),
        *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("pretraining_tp", "num_nextn_predict_layers", "qk_head_dim", "max_window_layers"),
        *("full_attention_interval", "attn_output_gate", "mamba_ssm_dtype"),
        *("is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    )
)
"""Keys that change no logits of these families, or that others follow from."""
_NEUTRAL = {
    "partial_rotary_factor": 1.0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
"""Values that switch a key off, beside null, false, 0 and empty ones."""
_ROPE_KEYS = (
    *("rope_type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),  # text alone has one position in all sections
)
_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_PARTIAL_ROTARY = ("glm4_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""``model_type`` of models that rotate a part of each head; others of transformers ignore it."""


class LatentDotProductAttention(DotProductAttention):
    """Megatron's local attention with a width of its own for values, for multi-latent attention."""

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
    """Return a model of a family with all parameters in ``dtype``.

    Tensor and pipeline sizes come from ``megatron.core.parallel_state``, which must be initialised.
    Initial weights depend on ``seed`` and, under pipeline parallelism, on the stage; load weights
    with :func:`megatron_fp8rl.export.load_hf` where topologies must agree.

    Args:
        pre_process: this chunk holds the embedding.
        post_process: this chunk holds the final norm and the output projection.
        vp_stage: chunk number under virtual pipelining, else None.
        seed: seed of the initial weights; the caller's random state is left as it was.
        transformer_layer_spec: spec that takes the place of megatron's local one.
        core_attention: class that takes the place of ``DotProductAttention`` in a dense model.
        **overrides: fields of ``TransformerConfig`` that differ from the defaults here, such as
            ``mtp_num_layers``.
    """
    config = transformer_config(hf_config, dtype=dtype, **overrides)
    tensor_parallel = config.tensor_model_parallel_size
    linear = "linear_attention" in (getattr(hf_config, "layer_types", None) or ())
    if linear and transformer_layer_spec is None:
        raise UnsupportedError(
            f"'{hf_config.model_type}' has layers of linear attention, which Megatron's local spec "
            "lacks; give transformer_layer_spec, or take the model from Megatron-Bridge."
        )
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
            rope_scaling=_rope(hf_config).get("rope_type") == "llama3",
            rope_scaling_factor=_rope(hf_config).get("factor", 1.0),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            mtp_block_spec=mtp_spec,
            vp_stage=vp_stage,
        )
    return model.to(dtype)  # torch norms are made in float32 whatever params_dtype says


def _local_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    if config.num_moe_experts is None:
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
    return spec


def _layer_spec(config: TransformerConfig) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )


def transformer_config(
    hf_config: Any, *, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> TransformerConfig:
    """Return the Megatron config of :func:`build_gpt`."""
    spec = ModelSpec.of(hf_config)
    family, modules = spec.family, _attention_modules(spec)
    _check_supported(hf_config, spec, dtype)
    heads, query = hf_config.num_attention_heads, modules.get("self_attn.q_proj")
    width = getattr(hf_config, "intermediate_size", None)
    fields: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        # That of experts where no layer is dense.
        "ffn_hidden_size": int(hf_config.moe_intermediate_size if width is None else width),
        "num_attention_heads": heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "qk_layernorm": "self_attn.q_norm" in modules,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": bool(modules["self_attn.o_proj"].bias),
        "add_qkv_bias": query is not None and bool(query.bias),
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
    if family.experts is not None and spec.experts:
        fields |= _moe_fields(hf_config, spec, family.experts)
    if family.attention.kv != "latent":
        return TransformerConfig(**{**CPU_CONFIG, **fields, **overrides})
    return MLATransformerConfig(
        **{**CPU_CONFIG, **fields, **_latent_fields(hf_config), **overrides}
    )


def _attention_modules(spec: ModelSpec) -> dict[str, Module]:
    """Return the modules of a layer with attention, by name within the layer."""
    layer = next(layer for layer in spec.layers if layer.mixer is spec.family.attention)
    return {module.name: module for module in layer.modules}


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


def _moe_fields(hf_config: Any, spec: ModelSpec, experts: Experts) -> dict[str, Any]:
    sigmoid = bool(experts.bias)  # the families whose routers have a bias take sigmoids
    normalized = getattr(hf_config, "norm_topk_prob", True)
    if sigmoid and not normalized:
        raise UnsupportedError(
            "Megatron divides the sigmoids of the chosen experts by their sum; set norm_topk_prob "
            "to true."
        )
    groups = getattr(hf_config, "n_group", None) or 1
    if groups > 1 and not sigmoid:
        raise _refused("n_group", groups, "set it to 1")
    if groups > 1 and hf_config.num_experts_per_tok != 2 * hf_config.topk_group:
        raise UnsupportedError(
            "Megatron scores a group by its best num_experts_per_tok // topk_group experts, "
            "transformers by its best two; set num_experts_per_tok to twice topk_group."
        )
    return {
        "num_moe_experts": spec.experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf_config, experts.width),
        "moe_layer_freq": [int(layer.sparse) for layer in spec.layers],
        "moe_shared_expert_intermediate_size": spec.shared_width or None,
        "moe_shared_expert_gate": bool(experts.shared_gate),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_pre_softmax": not normalized,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": hf_config.topk_group if groups > 1 else None,
        "moe_router_topk_scaling_factor": getattr(hf_config, "routed_scaling_factor", None),
        "moe_router_dtype": "fp32" if experts is not EXPERTS else None,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def _check_supported(hf_config: Any, spec: ModelSpec, dtype: torch.dtype) -> None:
    family = spec.family
    others = (LLAMA_LIKE, ARCEE, SEED_OSS, ERNIE4_5, GEMMA2, GEMMA3, COHERE, OLMO2, EXAONE4)
    if spec.model_type is None or family in others:  # they compute otherwise
        raise UnsupportedError(
            f"model_type '{hf_config.model_type}' has no builder; use 'llama', 'qwen2', 'qwen3' or "
            "a type with experts of the table of families."
        )
    if family.experts is not None and family.experts.leaves != EXPERTS.leaves:
        raise UnsupportedError(
            f"A {family.name} model has no builder: its experts have other names than Megatron's "
            "side gives them."
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(f"dtype {dtype} is not served; use bfloat16 or float32.")
    _check_keys(hf_config, family)
    output = _attention_modules(spec)["self_attn.o_proj"]
    mlp_bias = bool(family.mlp_bias and getattr(hf_config, family.mlp_bias, False))
    if bool(output.bias) != mlp_bias:
        raise UnsupportedError(
            "attention_bias and mlp_bias differ; Megatron has one switch for both, so set both or "
            "neither."
        )


def _check_keys(hf_config: Any, family: Family) -> None:
    """Refuse what the config says and the built model would not follow."""
    values, own = _values_of(hf_config)
    for key, value in values.items():
        known = key in _READ and (key in own or key in _OF_EVERY_CLASS)
        if value and not known and key not in _WITHOUT_EFFECT and value != _NEUTRAL.get(key):
            raise _refused(key, value, f"set it to {False if value is True else None}")
    served: dict[str, Any] = {"hidden_act": "silu", "rope_interleave": True}
    if family.experts is not None:
        biased = bool(family.experts.bias)
        served["topk_method"] = "noaux_tc" if biased else "greedy"
        served["scoring_func"] = "sigmoid" if biased else "softmax"
    for key, value in served.items():
        if key in values and values[key] != value:
            raise _refused(key, values[key], f"set it to {value!r}")
    kinds = {"full_attention"} | ({"linear_attention"} if family.linear_attention else set())
    if other := set(values.get("layer_types") or ()) - kinds:
        raise _refused("layer_types", sorted(other), f"use {' and '.join(sorted(kinds))}")
    rope = _rope(hf_config)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise _refused("rope_parameters.rope_type", kind, "use 'default' or 'llama3'")
    of_llama3 = dict(zip(_LLAMA3_KEYS, LLAMA3, strict=True)) if kind == "llama3" else {}
    for key, value in rope.items():
        if key in of_llama3 and value != of_llama3[key]:
            raise _refused(f"rope_parameters.{key}", value, f"set it to {of_llama3[key]}")
        if key not in _ROPE_KEYS and not (of_llama3 and key in (*of_llama3, "factor")):
            raise _refused(f"rope_parameters.{key}", value, "leave it out")
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0 and hf_config.model_type not in _PARTIAL_ROTARY:
        raise _refused("rope_parameters.partial_rotary_factor", part, "set it to 1.0")


def _values_of(hf_config: Any) -> tuple[dict[str, Any], Collection[str]]:
    """Return the values of a config, and the keys that its class has."""
    if not hasattr(hf_config, "to_dict"):
        return vars(hf_config), vars(hf_config)
    return hf_config.to_dict(), type(hf_config)().to_dict()


def _refused(key: str, value: Any, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        f"The config's {key} is {reprlib.repr(value)}, which this builder does not serve; "
        f"{remedy}, or take the model from Megatron-Bridge."
    )


def _rope(hf_config: Any) -> dict[str, Any]:
    return getattr(hf_config, "rope_parameters", None) or {}


def _rope_theta(hf_config: Any) -> float:
    theta = _rope(hf_config).get("rope_theta")
    return theta if theta is not None else hf_config.rope_theta
