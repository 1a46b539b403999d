"""GRPO with TRL, in FP8 on both sides: ``python examples/vllm_trl.py my-model --tiny --steps 2``.

With ``--tiny`` a small random model is written to the folder first, which a CPU trains in a minute.
torch_fp8rl trains; rollouts run in vLLM in the trainer's process, or with ``--server URL`` in a
server (docs/vllm.md, "TRL"). Each step sends weights and KV scales in one refit, and the trainer's
attention sees K and V as the FP8 cache holds them. Rewards and prompts are yours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__" and len(sys.argv) < 2:
    sys.exit("usage: python examples/vllm_trl.py MODEL [--tiny] [--steps N] [--server URL]")

import torch
import trl.generation.vllm_generation as generation
import trl.trainer.grpo_trainer as grpo
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM

from fp8rl import Recipe
from torch_fp8rl import convert, export_hf
from torch_fp8rl.kv import KVCacheInTraining, QKVObserver
from vllm_fp8rl import engine_args
from vllm_fp8rl.refit import refit

RECIPE = Recipe.from_dict({"pins": {"last": 1}})
PROMPTS = ["12+34=", "81-8=", "7*6=", "90/5="]


class Fp8LLM(LLM):
    """The engine that TRL makes, in FP8."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments | engine_args(RECIPE) | {"generation_config": "vllm"})


class Fp8Generation(generation.VLLMGeneration):
    """Sends weights with KV scales, which come from the forwards of the step before."""

    def _init_vllm(self) -> None:
        self.observer = QKVObserver(self.model)
        self.cache = KVCacheInTraining(self.model, RECIPE.kv_cache.dtype)
        super()._init_vllm()

    def _iter_named_params(self) -> Any:
        for name, tensor in chain(export_hf(self.model), self.scales.items()):
            yield name, tensor.to(self.accelerator.device)

    def sync_weights(self) -> None:
        self.scales = self.observer.scales(RECIPE.kv_cache.margin)
        self.observer.reset()
        if self.mode == "colocate":
            report = refit(self.llm, self._iter_named_params(), expect_kv_scales=True)
            self.accelerator.print(f"sent {report.tensors} tensors, {report.kv_scales} KV scales")
        else:
            super().sync_weights()
        self.cache.set(self.scales)


class FileClient(generation.VLLMClient):
    """Sends weights in a file to a server with the backend fp8rl; TRL's client needs NCCL."""

    def init_communicator(self, device: Any = 0) -> None:
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save_file(dict(named_params), Path(folder, "weights.safetensors"))
            self._start_weight_update()
            self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": folder}})
            self._finish_weight_update()


# TRL takes neither arguments for its LLM nor other classes in the place of these.
generation.LLM = Fp8LLM
grpo.VLLMGeneration = Fp8Generation
if not torch.cuda.is_available():
    generation.VLLMClient = FileClient


def reward(completions: list[str], **_: Any) -> list[float]:
    """Many digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def train(folder: str, steps: int, server: str | None) -> grpo.GRPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    convert(model, RECIPE)
    config = grpo.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_mode="server" if server else "colocate",
        vllm_server_base_url=server,
        vllm_max_model_length=64,
        max_completion_length=16,
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=steps,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    data = Dataset.from_dict({"prompt": PROMPTS * 8})
    trainer = grpo.GRPOTrainer(
        model, reward, config, train_dataset=data, processing_class=tokenizer
    )
    with torch.no_grad():  # the first rollout needs KV scales too
        model(**tokenizer(PROMPTS, padding=True, return_tensors="pt").to(model.device))
    trainer.train()
    return trainer


def make_tiny(folder: str) -> None:
    """Write a Qwen3 with random weights, whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    config = Qwen3Config(
        vocab_size=len(letters),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--server")
    given = parser.parse_args()
    if given.tiny:
        if Path(given.model).exists():
            sys.exit(f"{given.model} is there already; name a new folder, or leave out --tiny.")
        make_tiny(given.model)
    train(given.model, given.steps, given.server)
