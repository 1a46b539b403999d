"""Real in-process engines and the tiny checkpoints that they load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM reads these at import: the engine in this process, one thread, no downloads.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# vLLM compiles its logprobs helper at the first use: 15 s and a C++ compiler for nothing here.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

import vllm_fp8rl
from fp8rl import Recipe

LAYERS = 2
VOCAB = 512
KV_SCALE = 0.05


def make_checkpoint(path: Path, seed: int, **changes: Any) -> Path:
    """A random Qwen3 with head size 128 in BF16 safetensors, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
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
    model = Qwen3ForCausalLM(Qwen3Config(**(shape | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide a norm that is never refitted
            parameter.data.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """HF name -> BF16 tensor of a checkpoint made by :func:`make_checkpoint`."""
    return load_file(path / "model.safetensors")


@dataclass(frozen=True)
class Engine:
    """A live in-process engine."""

    llm: Any
    recipe: Recipe

    @property
    def model(self) -> torch.nn.Module:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def greedy(self, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
        """Greedy continuations of prompts given as token numbers."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def start_engine(path: Path, recipe: Recipe, **changes: Any) -> Engine:
    """An in-process engine, float32 so that numeric assertions can be tight."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 32 << 20,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    arguments |= vllm_fp8rl.engine_args(recipe) | changes
    return Engine(LLM(str(path), **arguments), recipe)
