"""Small models that add now and then, one of each architecture behind NeMo RL's FP8 recipes.

Each has the layers of the real one: experts and shared experts, latents, delta nets, a vision tower
of one block. Widths are multiples of 128 wherever block FP8 quantizes, and sizes of heads are the
real ones, for which the engines' attention kernels are written.

GRPO learns nothing from a random model, whose reward is always 0. So a model is first trained to
imitate sums (seconds on a GPU), in half of which a zero too many follows the answer: a policy that
is right about half of the time, and a habit that GRPO can drop within tens of steps. The sums are
made here, so that no data file is needed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8rl_demo.tasks import Problem, sample_batch
from fp8rl_demo.tokenizer import CharTokenizer

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
IGNORED = -100
"""The label that cross-entropy leaves out."""
_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 640,  # vLLM gives DeepGEMM no narrower experts than 640
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_LATENTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 640,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
}
_DELTA_NETS: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
_SIGMOID_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


@dataclass(frozen=True)
class TinyModel:
    """A small model: its classes in transformers, and what its config has beside ``_SHAPE``."""

    name: str
    """What the names of transformers' classes begin with."""
    changes: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 128
    """A multiple of what Megatron-Bridge pads the vocabulary to, which would add tokens to the
    trainer's softmax."""
    vision: bool = False
    """The model is the language part of a multimodal one."""
    only_vllm_reads: dict[str, Any] = field(default_factory=dict)
    """Keys that transformers leaves out of config.json."""


FAMILIES = {
    "qwen3": TinyModel("Qwen3"),
    "llama": TinyModel("Llama"),
    "qwen3_moe": TinyModel("Qwen3Moe", _EXPERTS | {"norm_topk_prob": True}),
    "moonlight": TinyModel("DeepseekV3", _LATENTS, 1280, only_vllm_reads=_SIGMOID_ROUTER),
    "deepseek_v3": TinyModel(
        "DeepseekV3",
        # Megatron scores a group by its best topk // group_topk experts, transformers by its best
        # two: equal here, as in the real model.
        _LATENTS | {"q_lora_rank": 256, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
        1280,
        only_vllm_reads=_SIGMOID_ROUTER,
    ),
    "qwen3_5": TinyModel("Qwen3_5", _DELTA_NETS, vision=True),
    "qwen3_5_moe": TinyModel(
        "Qwen3_5Moe",
        # As in 35B-A3B, so vLLM multiplies by Triton.
        _DELTA_NETS
        | _EXPERTS
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        vision=True,
    ),
    "minimax_m2": TinyModel(
        "MiniMaxM2",
        {
            "intermediate_size": 640,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        },
        only_vllm_reads={"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 64},
    ),
}
"""By the name that ``--family`` takes."""


def build(family: str, **tokenizer: int) -> Any:
    """Return an untrained model of a family, in float32.

    Args:
        family: a key of :data:`FAMILIES`.
        tokenizer: ``vocab_size`` and ``{bos,eos,pad}_token_id`` of the tokenizer.
    """
    import transformers

    tiny = FAMILIES[family]
    shape = _SHAPE | tokenizer | tiny.changes
    if tiny.vision:
        # Tokens of images that no text has, at the end of the vocabulary.
        media = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = {key: shape["vocab_size"] - 1 - i for i, key in enumerate(media)}
        tower = _TOWER | {"out_hidden_size": shape["hidden_size"]}
        config = getattr(transformers, f"{tiny.name}Config")(
            text_config=shape, vision_config=tower, tie_word_embeddings=False, **ids
        )
        kind = getattr(transformers, f"{tiny.name}ForConditionalGeneration")
    else:
        config = getattr(transformers, f"{tiny.name}Config")(**shape)
        kind = getattr(transformers, f"{tiny.name}ForCausalLM")
    model = kind._from_config(config, experts_implementation="eager")
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):  # of the transformers that NeMo RL pins
            # Not fla's: its backward on Hopper, by tilelang, cannot be compiled for float32.
            modeling = sys.modules[type(module).__module__]
            module.chunk_gated_delta_rule = modeling.torch_chunk_gated_delta_rule
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros would hide a refit that loses it
            buffer.data = torch.empty(buffer.shape).uniform_(-0.05, 0.05)
    return model


def save(model: Any, family: str, folder: Path) -> None:
    """Write a trained model in BF16 safetensors; what published checkpoints have in float32 stays.

    Args:
        model: the model of :func:`build`, on any device.
        family: the same as there.
        folder: to write.
    """
    biases = {
        name: buffer.float().cpu()
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    model.to("cpu", torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name in biases:
            buffer.data = biases[name]
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # the trainers keep it in BF16, so the values are BF16's
            parameter.data = parameter.data.float()
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= FAMILIES[family].only_vllm_reads
    if "text_config" in config:
        config["text_config"]["dtype"] = config["dtype"]  # as published; Bridge reads it there
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


class _Tokenizer(CharTokenizer):
    """The same characters, with fillers up to any size of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        super().__init__()


def problems() -> tuple[Problem, ...]:
    """Every sum and difference of a number below 100 and a digit that is not negative: 1955."""
    rows = []
    for a in range(100):
        for b in range(10):
            rows.append(Problem(f"{a}+{b}=", str(a + b)))
            if a >= b:
                rows.append(Problem(f"{a}-{b}=", str(a - b)))
    return tuple(rows)


def make_model(
    folder: Path,
    family: str = "qwen3",
    steps: int = 600,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    sums: Sequence[Problem] | None = None,
) -> Path:
    """Train the model and write it to ``folder`` with its tokenizer, in BF16 safetensors.

    Args:
        folder: to write.
        family: a key of ``tiny_models.FAMILIES``.
        steps: of AdamW.
        batch_size: demonstrations a step.
        learning_rate: at its highest.
        sums: what it learns; by default all of :func:`problems`.
    """
    torch.manual_seed(0)
    tokenizer = _Tokenizer(FAMILIES[family].vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(
        family,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    known = tuple(problems() if sums is None else sums)
    for step in range(steps):
        # Linear warm-up, then linear decay to a tenth.
        ramp = min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * ramp
        tokens, labels = (part.to(device) for part in _demonstrations(known, batch_size, step))
        # Causal, so the padding on the right is seen by nobody who counts.
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save(model, family, folder)
    hf = tokenizer.to_hf()
    hf.chat_template = CHAT
    hf.save_pretrained(folder)
    return folder


def _demonstrations(
    known: tuple[Problem, ...], size: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, both ``[size, length]`` int64, of one batch of sums with answers."""
    tokenizer, coin = CharTokenizer(), random.Random(f"sums/{step}")
    rows = []
    for problem in sample_batch(known, size, seed=0, step=step):
        answer = problem.answer if coin.random() < 0.5 else f"{problem.answer}0"
        prompt = tokenizer.encode(problem.prompt, add_bos=False)
        rows.append((prompt, [*tokenizer.encode(answer, add_bos=False), tokenizer.eos_id]))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((size, length), tokenizer.pad_id)
    labels = torch.full((size, length), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels
