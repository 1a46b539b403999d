"""Small models of the families that NeMo RL has FP8 recipes for, in its driver.

A family's YAML lies on top of our file under ``recipes/``, or of upstream's beneath it, cut down to
one GPU. Upstream's tests of these files (``tests/test_suites/`` of NeMo RL) bound the mismatch.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import yaml
from tiny_models import FAMILIES

from fp8rl.recipe import KVDtype

RECIPES = {
    "llama": "llama3.1-8b-fp8-2n8g.yaml",
    "qwen3": "qwen3-8b-fp8-kv-1n8g.yaml",
    "qwen3_moe": "qwen3-30b-a3b-fp8-8n8g.yaml",
    "moonlight": "moonlight-16b-fp8-4n8g.yaml",
    "deepseek_v3": "deepseek-v3-fp8-async-64n8g.yaml",
    "qwen3_5": "qwen3.5-9b-fp8-1n8g.yaml",
    "qwen3_5_moe": "qwen3.5-35b-a3b-fp8-2n8g.yaml",
    "minimax_m2": "minimax-m2.7-fp8-rollouts-8n8g.yaml",
}
"""File under ``recipes/`` of each family."""
GATES: dict[str, tuple[str, str, float]] = {
    "llama": ("train/token_mult_prob_error", "median", 1.1),
    "qwen3": ("train/token_mult_prob_error", "median", 2.0),
    "qwen3_moe": ("train/token_mult_prob_error", "median", 1.1),
    "moonlight": ("train/token_mult_prob_error", "median", 1.1),
    "deepseek_v3": ("train/token_mult_prob_error", "median", 1.1),
    "qwen3_5": ("train/gen_kl_error", "mean", 0.003),
    "qwen3_5_moe": ("train/gen_kl_error", "mean", 0.004),
    "minimax_m2": ("train/gen_kl_error", "mean", 0.01),
}
"""The curve that upstream's test of the recipe bounds over all steps, how, and the bound."""
RECIPE_FOLDER = Path(__file__).resolve().parents[1] / "recipes"
CACHES: dict[str, KVDtype] = {
    "upstream": "fp8_e4m3",
    "fp8rl": "fp8_e4m3",
    "fp8rl-int8kv": "int8_per_token_head",
    "fp8rl-exact": "fp8_e4m3",
    "fp8rl-exact-int8kv": "int8_per_token_head",
    "fp8rl-pinned": "int8_per_token_head",
}
"""KV caches of the variants; the others have one in BF16."""


def cut_down(value: dict[str, Any], family: str, variant: str) -> None:
    """Put a YAML on top of the family's recipe, in place, for a small model on one GPU.

    What the recipe says of precisions, pins, loss, router and recomputation stays. What is taken
    back is parallel and asynchronous, or made for long answers.
    """
    file = RECIPE_FOLDER / RECIPES[family]
    upstream = yaml.safe_load(file.read_text(encoding="utf-8"))["defaults"][0]
    value["defaults"] = [str(file) if variant.startswith("fp8rl") else upstream]
    if variant in ("fp8rl-bf16kv", "fp8rl-int8kv"):
        value["fp8rl"] = {"kv_cache": {"dtype": CACHES.get(variant, "auto")}}
    value["grpo"] |= {
        "async_grpo": {"enabled": False, "in_flight_weight_updates": False},
        "use_dynamic_sampling": False,
        "batch_multiplier": 1,
        "reward_scaling": {"enabled": False},
        "reward_shaping": {"enabled": False},
    }
    policy = value["policy"]
    del value["loss_fn"], policy["optimizer"], policy["scheduler"]  # the latter are DTensor's
    policy |= {
        "tokenizer": {"name": policy["model_name"]},
        "logprob_batch_size": policy["train_micro_batch_size"],
        "logprob_chunk_size": None,
        "offload_optimizer_for_logprob": False,
        "dynamic_batching": {"enabled": False},
    }
    policy["megatron_cfg"] |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "sequence_parallel": False,
        # Refits share memory of the GPU between processes, which not every host allows with this.
        "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    }
    generation = policy["generation"]
    generation["max_new_tokens"] = policy["max_total_sequence_length"]
    generation["colocated"] = {
        "enabled": True,
        "resources": {"gpus_per_node": None, "num_nodes": None},
    }
    generation["vllm_cfg"] |= {
        "expert_parallel_size": 1,
        "enable_expert_parallel": False,
        "async_engine": False,
        "max_model_len": policy["max_total_sequence_length"],
    }
    generation["vllm_kwargs"] = {"speculative_config": None}  # the small models have no drafter
    if variant == "bf16":
        generation["vllm_cfg"] |= {"precision": "bfloat16", "kv_cache_dtype": "auto"}
        policy["megatron_cfg"]["fp8_cfg"] = {"enabled": False}
        # As in upstream's files in BF16: not all of vLLM's layouts of experts can be refitted.
        generation["vllm_kwargs"]["moe_backend"] = "triton"
    if FAMILIES[family].vision:
        generation["vllm_kwargs"]["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    if family == "moonlight" and variant == "bf16":
        # Upstream's worker cannot import it: see `refusal`. Ours can, and does nothing else here.
        policy["megatron_cfg"]["fp8rl"] = {"training": False}
    if family == "deepseek_v3":
        # Upstream's file has loss_fn.force_on_policy_ratio, which takes one optimizer step a step.
        grpo = value["grpo"]
        policy["train_global_batch_size"] = (
            grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
        )
    if family == "minimax_m2":
        # Upstream's file has the integer 0, which transformers 5.8 refuses.
        policy["hf_config_overrides"] = {"router_aux_loss_coef": 0.0}
    value["env"]["math"]["math_verify_impl"] = "hf_math_verify"


def gate(family: str, curves: dict[str, list[float]]) -> dict[str, Any]:
    """Compare a run's mismatch over all steps with the bound of upstream's test of the recipe."""
    curve, kind, bar = GATES[family]
    steps = curves.get(curve)
    if not steps:
        return {}
    found = {"mean": statistics.mean, "median": statistics.median}[kind](steps)
    return {"curve": curve, kind: round(found, 6), "bar": bar, "passed": found < bar}
