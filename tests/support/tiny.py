"""Make small random checkpoints: Qwen3, Qwen3-MoE, DeepSeek-V2 and V3, Qwen3.5, Qwen3-VL."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "num_position_embeddings": 16,
}


def make_checkpoint(path: Path, seed: int, **changes: Any) -> Path:
    """Write a random Qwen3 with head size 128 in BF16 safetensors, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(Qwen3Config, Qwen3ForCausalLM, path, seed, changes)


def make_moe_checkpoint(path: Path, seed: int, **changes: Any) -> Path:
    """Write a random Qwen3-MoE in the same way, with six experts per layer and two per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "moe_intermediate_size": 256,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return _save(Qwen3MoeConfig, Qwen3MoeForCausalLM, path, seed, experts | changes)


def make_mla_checkpoint(path: Path, seed: int, **changes: Any) -> Path:
    """Write a random DeepSeek-V3 in the same way: one dense layer, then two with eight experts.

    The latent is 512 and 64 wide, which is all that vLLM's kernel for CPUs takes.
    """
    import transformers

    shape: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_mtp_layers": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 64,
    }
    name = "DeepseekV3"
    if changes.pop("model_type", None) == "deepseek_v2":
        name = "DeepseekV2"
        shape |= {"topk_method": "greedy", "norm_topk_prob": False}
    config, kind = (getattr(transformers, name + end) for end in ("Config", "ForCausalLM"))
    _save(config, kind, path, seed, shape | changes)
    # transformers leaves out what only vLLM reads.
    routing: dict[str, Any] = {"moe_layer_freq": 1}
    if name == "DeepseekV3":
        routing |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    _add_to_config(path, routing)
    return path


def make_qwen35_checkpoint(
    path: Path, seed: int, *, experts: bool = False, vision: bool = False, **changes: Any
) -> Path:
    """Write a random Qwen3.5 in the same way: three gated delta nets, then full attention.

    ``experts`` as in 35B-A3B, else as in 9B; ``vision``: inside the wrapper, with a tower.
    """
    import transformers

    shape = _SHAPE | {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",  # vLLM's; kernels for a CPU take no other state
    }
    if experts:
        shape |= {
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        }
    shape |= changes
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = getattr(transformers, f"{name}TextConfig")(**shape)
    kind = getattr(transformers, f"{name}ForCausalLM")
    if vision:
        tower = _TOWER | {"out_hidden_size": shape["hidden_size"]}
        whole = getattr(transformers, f"{name}Config")
        config = whole(text_config=config.to_dict(), vision_config=tower)
        config.tie_word_embeddings = shape["tie_word_embeddings"]
        kind = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(seed)
    model = kind(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("linear_attn.norm.weight", "dt_bias")):
            parameter.data.uniform_(0.5, 1.5)
        elif parameter_name.endswith("norm.weight"):  # the norm multiplies by 1 + weight
            parameter.data.uniform_(-0.5, 0.5)
        if not parameter_name.endswith("A_log"):  # float32 in published checkpoints too
            parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(path)
    return path


def make_qwen3_vl_checkpoint(path: Path, seed: int) -> Path:
    """Write a random Qwen3-VL in the same way: a dense Qwen3 behind a tower of one block."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
    tower = _TOWER | {"out_hidden_size": _SHAPE["hidden_size"], "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=_SHAPE | {"rope_parameters": rope | {"mrope_interleaved": True}},
        vision_config=tower,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return _write(Qwen3VLForConditionalGeneration(config), path)


_MOE: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Keys of MoE configs; a config takes those that it has."""
_ONLY_VLLM_READS: dict[str, dict[str, Any]] = {
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 64},
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}


def make_family_checkpoint(path: Path, seed: int, model_type: str, **changes: Any) -> Path:
    """Write a random text model of a family of :mod:`fp8rl.models.families` in the same way."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {key: n for key, n in _MOE.items() if hasattr(AutoConfig.for_model(model_type), key)}
    config = partial(AutoConfig.for_model, model_type)
    _save(config, AutoModelForCausalLM.from_config, path, seed, known | changes)
    _add_to_config(path, _ONLY_VLLM_READS.get(model_type, {}))
    return path


def _add_to_config(path: Path, values: dict[str, Any]) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | values), encoding="utf-8")


def _save(config: Any, kind: Any, path: Path, seed: int, changes: dict[str, Any]) -> Path:
    torch.manual_seed(seed)
    return _write(kind(config(**(_SHAPE | changes))), path)


def _write(model: Any, path: Path) -> Path:
    for name, parameter in model.named_parameters():
        if name.endswith(
            "norm.weight"
        ):  # with all ones, a norm that is never refitted would go unnoticed
            parameter.data.uniform_(0.5, 1.5)
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32; zeros would not show in the routes
            buffer.data = torch.empty(buffer.shape).uniform_(-0.1, 0.1)
    model.save_pretrained(path)
    return path


def add_chat_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with a token for each character, and a chat template, into a folder."""
    from fp8rl_demo.tokenizer import CharTokenizer

    class Ascii(CharTokenizer):
        tokens = [chr(code) for code in (10, *range(32, 127))]

    hf = Ascii().to_hf()
    hf.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    hf.save_pretrained(folder)
    return folder
