"""A real engine on the GPU, in this process, and its rollouts."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM reads these at import, or once for all engines of a process: the engine in this process, its
# workers, if any, spawned (CUDA is in use here), no downloads, and torch's own sampler.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.kv_scales import scale_name
from support.gaps import gap, observed_kv_scales
from support.hf_reference import load_reference
from support.tiny import make_checkpoint
from support.wrong_tensors import slope

log = logging.getLogger(__name__)

LAYERS = 2
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.04,
}
PROMPTS = [[(37 * i + 11 * j * j) % 500 + 5 for j in range(4 + i % 3)] for i in range(64)]
"""Short, so that nearly all keys and values come from decode steps, which run in captured graphs"""


QUICK = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 64],
    }
}
"""For ``start_engine``: decode steps in full graphs, without the minute that compilation takes."""


def make_checkpoints(root: Path) -> dict[str, Path]:
    """Two checkpoints of one shape, ``a`` and ``b``."""
    return {name: make_checkpoint(root / name, seed, **SHAPE) for seed, name in enumerate("ab")}


def refit_tensors(path: Path, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint and, with an FP8 cache, the scales that it calls for."""
    tensors = load_file(path / "model.safetensors")
    for name, value in kv_scales(path, recipe).items():
        tensors[name] = torch.tensor([value])
    return tensors


def kv_scales(path: Path, recipe: Recipe) -> dict[str, float]:
    """Scale of every layer and role; none without an FP8 cache."""
    if not recipe.kv_cache.has_scales:
        return {}
    # A normed query has length sqrt(128) times at most 1.5, the largest norm weight.
    queries = {scale_name(i, "q"): 1.5 * math.sqrt(128) / 448 for i in range(LAYERS)}
    prompts = [p + p for p in PROMPTS[:16]]
    return observed_kv_scales(path, recipe, prompts, device="cuda") | queries


@dataclass(frozen=True)
class Rollout:
    """Sampled tokens with the logprobs that the engine gave them, prompt after prompt."""

    tokens: list[list[int]]
    logprobs: torch.Tensor


@dataclass(frozen=True)
class GpuEngine:
    llm: Any
    recipe: Recipe

    @property
    def model(self) -> torch.nn.Module:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    def rollout(self, tokens: int = 28, temperature: float = 1.0) -> Rollout:
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(
                temperature=temperature,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=7,
            ),
            use_tqdm=False,
        )
        sampled = [list(output.outputs[0].token_ids) for output in outputs]
        logprobs = [
            step[token].logprob
            for output, row in zip(outputs, sampled, strict=True)
            for step, token in zip(output.outputs[0].logprobs, row, strict=True)
        ]
        return Rollout(sampled, torch.tensor(logprobs))

    def greedy(self) -> list[list[int]]:
        return self.rollout(temperature=0.0).tokens


def start_engine(path: Path, recipe: Recipe, **changes: Any) -> GpuEngine:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.1,  # must be free at the start; the line above is what counts
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    return GpuEngine(LLM(str(path), **arguments | vllm_fp8rl.engine_args(recipe) | changes), recipe)


def expected_logprobs(path: Path, recipe: Recipe, rollout: Rollout, **options: Any) -> torch.Tensor:
    """Of a rollout's tokens, by transformers with fake quantization (``load_reference``)."""
    sequences = [p + t for p, t in zip(PROMPTS, rollout.tokens, strict=True)]
    logprobs = load_reference(path, recipe, device="cuda", **options).many(sequences)
    rows = logprobs.split([len(sequence) - 1 for sequence in sequences])
    return torch.cat([r[-len(t) :] for r, t in zip(rows, rollout.tokens, strict=True)])


def assert_as_close(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    own: torch.Tensor,
    plain: torch.Tensor,
    *,
    far: float = 2.0,
    near: float = 0.6,
) -> None:
    """Hold an engine in BF16 to what BF16 itself costs: ``own``, transformers' logprobs in it.

    ``far``: most times ``own``'s distance; ``near``: least share of the way from ``plain``.
    """
    floor, found = gap(own, expected), gap(actual, expected)
    share, best = slope(actual, expected, plain), slope(own, expected, plain)
    log.info("%s: floor %.4f, engine %.4f nats", name, floor.mean, found.mean)
    log.info("unquantized %.4f; slopes %.3f, %.3f", gap(plain, expected).mean, best, share)
    assert found.mean < far * floor.mean, (found, floor)
    assert share > near * best, (share, best)


def places(engine: GpuEngine) -> dict[str, int]:
    """Addresses of everything that captured graphs read."""
    tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors}


def check_through_refits(
    engine: GpuEngine,
    give: Callable[[str], object],
    expected: Callable[..., torch.Tensor],
    **bounds: float,
) -> None:
    """Refit with ``a``, ``b``, ``a``: transformers' logprobs each time, then the first tokens."""
    before, tokens = places(engine), []
    for name in "aba":
        give(name)
        tokens.append(engine.greedy())
        rollout = engine.rollout()
        exact = expected(name, rollout, engine.recipe)
        own = expected(name, rollout, engine.recipe, dtype=torch.bfloat16)
        plain = expected(name, rollout, Recipe(rollout=False))
        assert_as_close(name, rollout.logprobs, exact, own, plain, **bounds)
    assert tokens[0] == tokens[2] != tokens[1]
    assert places(engine) == before


def agreement(tokens: list[list[int]], others: list[list[int]]) -> float:
    """The share of equal tokens."""
    pairs = zip(tokens, others, strict=True)
    equal = sum(a == b for one, two in pairs for a, b in zip(one, two, strict=True))
    return equal / sum(map(len, tokens))
