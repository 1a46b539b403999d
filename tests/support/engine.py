"""Real in-process engines and the tiny checkpoints that they load."""

from __future__ import annotations

import functools
import importlib
import json
import os
from contextlib import nullcontext
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

import pytest
import torch
from safetensors.torch import load_file

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.kv_scales import scale_name, scale_names
from fp8rl.numerics import quantize_block
from support.no_torchvision import without_torchvision
from support.tiny import make_checkpoint as make_checkpoint

# Where another test has imported torch already, the variable above comes too late, and an engine in
# a process of its own, which reads it, would sum in another order.
set_threads = torch.set_num_threads
"""Sets the threads of a process; vLLM's worker on a CPU puts one that does nothing in its place."""
set_threads(1)

LAYERS = 2
VOCAB = 512
KV_SCALE = 0.05
PROMPTS = [[5, 6, 7, 8], [9] * 40, [100, 200, 300]]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 32 << 20,
    "skip_tokenizer_init": True,
    "seed": 0,
}
"""Of every small engine here."""


FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""The linear layers of a dense model's layer in vLLM, and their parts in the checkpoint."""
SCALES = {name: torch.tensor([KV_SCALE]) for name in scale_names(LAYERS, ("k", "v"))}
"""As a trainer sends them behind the weights."""


def keep_process_groups(engine: Any) -> None:
    """Keep a leaving engine from shutting down process groups that all share (vLLM 0.31 on)."""
    finalizer = getattr(engine.llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with FP8 codes and scales for every projection."""
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            wire[name], wire[f"{name}_scale_inv"] = quantize_block(tensor)
        else:
            wire[name] = tensor
    return wire


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """HF name -> BF16 tensor of a checkpoint made by :func:`make_checkpoint`."""
    return load_file(path / "model.safetensors")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, in whatever shapes."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(same_bits(tensor, other[name]) for name, tensor in one.items())


@dataclass(frozen=True)
class Engine:
    """A live in-process engine."""

    llm: Any
    recipe: Recipe

    @property
    def model(self) -> torch.nn.Module:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def pointers(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.model.named_parameters()}

    def kv_scales(self) -> dict[str, float]:
        """KV scales in service, by their HF names."""
        from vllm_fp8rl.kv.scales import kv_scale_state

        return {scale_name(*key): value for key, value in kv_scale_state(self.model).items()}

    def greedy(self, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
        """Greedy continuations of prompts given as token numbers."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def refuses(self, error: type[Exception], match: str) -> None:
        """Assert that generation raises, and drop the requests that it leaves behind."""
        from vllm_fp8rl.refit import drop_requests

        with pytest.raises(error, match=match):
            self.greedy(PROMPTS)
        drop_requests(self.llm)


def register_model(path: Path) -> None:
    """Give vLLM the class of a model: a name it would ask in a process of its own, for 10 s."""
    from vllm import ModelRegistry

    (name,) = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
    known: Any = ModelRegistry.models.get(name)
    if known is None and name.startswith("Qwen3_5"):  # vLLM 0.25 lists it with its tower alone
        module, kind = "vllm.model_executor.models.qwen3_5", name
    elif hasattr(known, "module_name"):
        module, kind = known.module_name, known.class_name
    else:  # unknown, or a class already
        return
    reads_images = module.endswith(("qwen3_5", "qwen3_vl"))
    with without_torchvision() if reads_images else nullcontext():
        source = importlib.import_module(module)
    ModelRegistry.register_model(name, getattr(source, kind))


@functools.cache
def replace_kernels_once() -> None:
    """Let vLLM replace its Triton kernels once: the search is two thirds of an engine's start."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    name = "register_triton_kernel_overrides"
    if hasattr(platform, name):  # there may be releases without it
        setattr(platform, name, staticmethod(functools.cache(getattr(platform, name))))


def start_engine(path: Path, recipe: Recipe, **changes: Any) -> Engine:
    """An in-process engine, float32 so that numeric assertions can be tight."""
    from vllm import LLM

    register_model(path)
    replace_kernels_once()
    arguments = SETTINGS | vllm_fp8rl.engine_args(recipe) | changes
    return Engine(LLM(str(path), **arguments), recipe)
