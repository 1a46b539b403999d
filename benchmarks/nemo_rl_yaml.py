"""The YAMLs that ``nemo_rl.py`` gives to NeMo RL's driver: four tasks and three loops."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from long_tasks import answer_length, prompt_length
from nemo_rl_families import CACHES, RECIPE_FOLDER, cut_down
from real_model import shape_of
from reasoning_tasks import TASKS as REASONING

from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import KVDtype

BATCH = 128
"""Sequences of an optimizer step, in one micro-batch on each GPU."""
LEARNING_RATE = 4e-5
WARMUP_STEPS = 5
TOKENS_IN, TOKENS_OUT = 512, 1024
MICRO_BATCH = {"1.7b": (8, 8), "4b": (8, 8), "8b": (8, 4), "30b-a3b-12l": (4, 8)}
"""Sequences of a training micro-batch on one H200, and on each of several, which share the
optimizer's state (by count, not run). They are as many as have room, since in small ones the GPU
waits for the host."""
TIGHT = ("8b", "30b-a3b-12l")
"""Sizes for which one GPU is tight: activations are computed again in the backward pass (without
that 8B has room for micro-batches of two there), and the optimizer takes 10 bytes a parameter for
12."""
LOGPROB_BATCH = {"1.7b": 16, "4b": 16, "8b": 8, "30b-a3b-12l": 8}
"""Sequences of a micro-batch of log-probabilities. No activations are kept there, but Megatron
copies the logits once, which takes 5 GB for eight sequences."""
LOGPROB_CHUNK = 256
"""Tokens of a sequence whose logits are in float32 at once."""
BATCHED_TOKENS = 8192
"""Of vLLM's steps that compute prompts."""
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
"""All answers are equally long, so nearly all steps have all sequences."""
REAL_LEARNING_RATE = 1e-6
KV_BLOCK = 16
"""Tokens of a block of vLLM's KV cache."""
CACHE_SLACK = 1.02
HELD_OUT = 128
"""Problems of a validation, answered once each at temperature 1, as NeMo RL does."""
REASONING_HELD_OUT = 512
REASONING_LEARNING_RATE = 1e-5
MOST_SEQUENCES = 256
"""Of a decode step."""
VALIDATION_STEPS = 20
"""Never before the first step, when an FP8 KV cache has no scales of the trainer."""
CHECKPOINT_STEPS = 10
ROUND = 64
"""Sequences are padded to a multiple of this, as kernels in FP8 want it."""
MICRO_BATCH_TOKENS = 16_384


def config(
    options: argparse.Namespace, model: Path, data: Path, logs: Path, variant: str
) -> dict[str, Any]:
    """One variant's YAML; upstream's FP8 trains and has an FP8 KV cache where Megatron trains."""
    source, megatron = options.source.resolve(), options.trainer == "megatron"
    batch = batch_size(options)
    vllm: dict[str, Any] = {
        "tensor_parallel_size": options.gpus,
        "enforce_eager": not options.graphs,
        "gpu_memory_utilization": 0.3,
        "use_tqdm": False,
    }
    value: dict[str, Any] = {
        "defaults": [str(source / "examples" / "configs" / "grpo_math_1B.yaml")],
        "grpo": {
            "num_prompts_per_step": options.prompts,
            "num_generations_per_prompt": options.generations,
            "max_num_steps": options.steps,
            "val_period": 0,
            "val_at_start": False,
            "seed": options.seed,
        },
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 64,
            "train_global_batch_size": batch,
            "train_micro_batch_size": batch // options.gpus,
            "sequence_packing": {"enabled": False},
            "dtensor_cfg": {"enabled": not megatron, "_v2": False},
            "optimizer": {"kwargs": {"lr": LEARNING_RATE}},
            "scheduler": [
                {
                    "name": "torch.optim.lr_scheduler.LinearLR",
                    "kwargs": {"start_factor": 0.2, "total_iters": WARMUP_STEPS},
                },
                {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}},
                {"milestones": [WARMUP_STEPS]},
            ],
            "megatron_cfg": {
                "enabled": megatron,
                "optimizer": {
                    "lr": LEARNING_RATE,
                    "min_lr": LEARNING_RATE,
                    "use_precision_aware_optimizer": False,  # as in upstream's FP8 recipes
                },
                "scheduler": {"lr_warmup_iters": WARMUP_STEPS},
            },
            "generation": {"vllm_cfg": vllm},
        },
        "loss_fn": {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        },
        "data": {
            "max_input_seq_length": 32,
            "num_workers": 0,
            "train": {
                "_override_": True,
                "dataset_name": "ResponseDataset",
                "data_path": str(data),
                "input_key": "input",
                "output_key": "output",
            },
            "validation": None,
            "default": {"prompt_file": None, "system_prompt_file": None},
        },
        "env": {"math": {"num_workers": 2}},  # each imports torch while vLLM starts
        "checkpointing": {"enabled": False},
        "logger": {
            "log_dir": str(logs),
            "wandb_enabled": False,
            "mlflow_enabled": False,
            "swanlab_enabled": False,
            "tensorboard_enabled": True,
            "monitor_gpus": False,
        },
        "cluster": {"gpus_per_node": options.gpus, "num_nodes": 1},
    }
    if options.family:
        cut_down(value, options.family, variant)
        return value
    if variant.startswith("upstream"):
        both = megatron and variant == "upstream"
        vllm |= {"precision": "fp8", "kv_cache_dtype": "fp8" if both else "auto"}
        value["policy"]["megatron_cfg"] |= {
            "fp8_cfg": {"enabled": both},
            "env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        }
    if variant.startswith("fp8rl"):
        value["defaults"].append(str(RECIPE_FOLDER / "keys.yaml"))
        value["fp8rl"] = {
            "training": variant != "fp8rl-rollout",
            "kv_cache": {"dtype": CACHES.get(variant, "auto")},
            "pins": {"layers": [1]} if megatron else {},
        }
        if not megatron:
            value["policy"]["dtensor_cfg"]["fp8rl"] = "${fp8rl}"
    if variant.startswith("fp8rl-exact"):
        value["fp8rl"] |= {"exact": True, "pins": {}}
        value["policy"]["logprob_chunk_size"] = 1024
        value["policy"]["megatron_cfg"]["defer_fp32_logits"] = True
        # The other tasks compare variants, so that all make their batches alike.
        value["policy"]["sequence_packing"]["enabled"] = options.task == "sums"
    if options.single_controller:
        single_controller(value, source, options)
    if options.in_flight:
        value["grpo"]["async_grpo"] = {"enabled": True, "in_flight_weight_updates": True}
    if options.single_controller or options.in_flight:
        if variant == "fp8rl":
            value["fp8rl"]["kv_cache"]["recalibrate"] = "grow"
        generation = value["policy"]["generation"]
        generation["colocated"] = {"enabled": False, "resources": {"gpus_per_node": 1}}
        generation["vllm_cfg"] |= {"tensor_parallel_size": 1, "async_engine": True}
    if options.task != "sums":
        value["grpo"]["skip_reference_policy_logprobs_calculation"] = True
        value["loss_fn"]["reference_policy_kl_penalty"] = 0
        if "fp8rl" in value:
            value["fp8rl"]["pins"] = {}  # upstream's FP8 has none either
    if variant == "fp8rl-pinned":
        value["fp8rl"]["pins"] = {"kinds": ["qkv_proj"], "last": 1}
    checkpoints = logs.with_name(logs.name.replace("logs", "checkpoints", 1))
    if options.task == "long":
        longest = options.programs[1]
        tokens = prompt_length(longest), answer_length(longest)
        long_answers(value, tokens, HELD_OUT, data, checkpoints)
    if options.task == "reasoning":
        task = REASONING[options.gym]
        tokens = task.tokens_in, task.tokens_out
        long_answers(value, tokens, REASONING_HELD_OUT, data, checkpoints)
        reasoning(value, task.tokens_out)
    if options.task == "real":
        real_size(value, options.size, shape_of(options.size), variant, options.gpus)
    return value


def batch_size(options: argparse.Namespace) -> int:
    """Sequences of an optimizer step: BATCH, or all of a step that has fewer."""
    return min(BATCH, options.prompts * options.generations)


def single_controller(value: dict[str, Any], source: Path, options: argparse.Namespace) -> None:
    """Change a YAML to the single controller's, in place."""
    sequences = options.prompts * options.generations
    name = "grpo_math_1B_megatron_single_controller.yaml"
    value["defaults"][0] = str(source / "examples" / "configs" / name)
    value["policy"] |= {
        "train_global_batch_size": sequences,
        # A step comes in pieces of whole prompts, as their rollouts become ready.
        "train_micro_batch_size": options.generations,
        "logprob_batch_size": options.generations,
    }
    value["async_rl"] = {"min_groups_for_streaming_train": options.prompts // 2}
    value["data_plane"] = {"enabled": True, "storage_capacity": 8 * sequences}


def reasoning(value: dict[str, Any], tokens_out: int) -> None:
    """Change a YAML with long answers to those of a pretrained model to reasoning-gym, in place."""
    policy = value["policy"]
    # Float32 logits of 49,152 words take gigabytes of a GPU that several runs share.
    policy["logprob_chunk_size"] = LOGPROB_CHUNK
    policy["generation"]["max_new_tokens"] = tokens_out
    length = policy["max_total_sequence_length"]
    policy["dynamic_batching"]["train_mb_tokens"] = max(MICRO_BATCH_TOKENS // 4, length)
    megatron = policy["megatron_cfg"]
    megatron["defer_fp32_logits"] = True
    megatron["optimizer"] |= {"lr": REASONING_LEARNING_RATE, "min_lr": REASONING_LEARNING_RATE}
    policy["optimizer"]["kwargs"]["lr"] = REASONING_LEARNING_RATE
    value["data"]["default"]["env_name"] = "reasoning_gym"
    value["env"] = {"reasoning_gym": {}}


def long_answers(
    value: dict[str, Any], tokens: tuple[int, int], held_out: int, data: Path, checkpoints: Path
) -> None:
    """Change a YAML of the benchmark to long answers, in place.

    Args:
        value: the YAML.
        tokens: of the longest prompt and of the longest answer.
        held_out: problems of a validation.
        data: file of the training data; ``validation.jsonl`` lies beside it.
        checkpoints: folder for checkpoints, from the last of which a run goes on.
    """
    needed = sum(tokens) + ROUND  # and what the checker says
    length = -(-needed // ROUND) * ROUND
    value["grpo"] |= {
        "val_period": VALIDATION_STEPS,
        "max_val_samples": held_out,
        "val_batch_size": held_out,
    }
    policy = value["policy"]
    most_tokens = max(MICRO_BATCH_TOKENS, length)
    policy |= {
        "max_total_sequence_length": length,
        "make_sequence_length_divisible_by": ROUND,
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": most_tokens,
            "logprob_mb_tokens": most_tokens,
            "sequence_length_round": ROUND,
        },
    }
    policy["megatron_cfg"]["checkpoint"] = {"async_save": False}
    grpo = value["grpo"]
    answers = max(held_out, grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"])
    most = min(MOST_SEQUENCES, answers)
    generation = policy["generation"]
    generation["vllm_cfg"]["enforce_eager"] = False
    generation["vllm_kwargs"] = graphs(most) | {"max_num_seqs": most}
    rows = value["data"]
    rows["max_input_seq_length"] = tokens[0] + 1
    rows["train"]["split_validation_size"] = 0
    rows["validation"] = rows["train"] | {"data_path": str(data.with_name("validation.jsonl"))}
    value["checkpointing"] = {
        "enabled": True,
        "checkpoint_dir": str(checkpoints),
        "metric_name": None,
        "save_period": CHECKPOINT_STEPS,
        "keep_top_k": 1,
        "model_save_format": None,  # as DTensor's first worker has it; Megatron has its own
    }


def graphs(most: int) -> dict[str, Any]:
    """Return vLLM's arguments for decode steps of up to ``most`` sequences in full graphs.

    They spare the minutes that torch.compile takes to start.
    """
    return {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, most + 1, 16)],
        }
    }


def real_size(
    value: dict[str, Any], size: str, shape: Mapping[str, Any], variant: str, gpus: int
) -> None:
    """Change a YAML of the benchmark to a model of real size, in place.

    Args:
        value: the YAML.
        size: key of MICRO_BATCH.
        shape: the model's ``config.json``.
        variant: says what is in FP8.
        gpus: GPUs, each of which has an engine of its own and trains on its share, with its share
            of the experts.
    """
    grpo, policy = value["grpo"], value["policy"]
    sequences = grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
    policy |= {
        "max_total_sequence_length": TOKENS_IN + TOKENS_OUT,
        "train_global_batch_size": sequences,
        "train_micro_batch_size": micro_batch(size, gpus),
        "logprob_batch_size": LOGPROB_BATCH[size],
        # Whole float32 logits of 151,936 words would take half of a micro-batch's memory.
        "logprob_chunk_size": LOGPROB_CHUNK,
        # The optimizer stays on the GPU; elsewhere its way to the host and back takes seconds.
        "offload_optimizer_for_refit": False,
    }
    megatron = policy["megatron_cfg"]
    megatron["defer_fp32_logits"] = True
    tight = size in TIGHT and gpus == 1
    megatron["activation_checkpointing"] = tight
    if ModelSpec.of(shape).experts:
        megatron["expert_model_parallel_size"] = gpus
    megatron["optimizer"] |= {
        "lr": REAL_LEARNING_RATE,
        "min_lr": REAL_LEARNING_RATE,
        "use_precision_aware_optimizer": tight,
    }
    generation = policy["generation"]
    of_engine = sequences // gpus
    prompts = -(-grpo["num_prompts_per_step"] // gpus)
    generation |= {
        "max_new_tokens": TOKENS_OUT,
        # No answer ends early, whatever is sampled.
        "ignore_eos": True,
        "stop_token_ids": [],
        "vllm_kwargs": {
            "max_num_seqs": of_engine,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "kv_cache_memory_bytes": cache_bytes(
                shape, prompts, of_engine, CACHES.get(variant, "auto")
            ),
            "compilation_config": {
                "cudagraph_capture_sizes": [n for n in GRAPH_SIZES if n < of_engine] + [of_engine]
            },
        },
    }
    generation["vllm_cfg"] |= {
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "use_deep_gemm": variant == "upstream",
    }
    if "expert_model_parallel_size" in megatron and variant == "bf16":
        # As in upstream's file for Qwen3-30B-A3B: not all of vLLM's layouts of experts in BF16 can
        # be refitted.
        generation["vllm_kwargs"]["moe_backend"] = "triton"
    value["data"]["max_input_seq_length"] = TOKENS_IN + 1  # longer ones are cut
    value["env"]["math"]["verifier_type"] = "english_multichoice"


def micro_batch(size: str, gpus: int) -> int:
    """Return the sequences of a training micro-batch."""
    alone, shared = MICRO_BATCH[size]
    return alone if gpus == 1 else shared


def cache_bytes(shape: Mapping[str, Any], prompts: int, sequences: int, dtype: KVDtype) -> int:
    """Return the bytes of a KV cache that holds all sequences at once.

    The samples of a prompt share its blocks but for the last one (prefix caching).

    Args:
        shape: the model's ``config.json``.
        prompts: different prompts.
        sequences: samples of all of them.
        dtype: of the cache.
    """
    token = Sizes(ModelSpec.of(shape), 1).kv_per_token(2, dtype)
    tokens = prompts * TOKENS_IN + sequences * (TOKENS_OUT + 2 * KV_BLOCK)
    return int(token * tokens * CACHE_SLACK)
