"""The rollout engine: real vLLM in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import cdiv
from fp8rl.plugins.hookspecs import RefitReport
from fp8rl.recipe import Recipe
from fp8rl_demo.settings import Settings, hf_config

GPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE_ENV = {
    **GPU_ENV,
    # More threads make vLLM's CPU kernels slower here and the run not repeatable.
    "OMP_NUM_THREADS": "1",
    # Otherwise vLLM compiles a helper with inductor: 15 s, and it needs a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment variables that must be set before torch is imported, on a CPU."""


def engine_env() -> dict[str, str]:
    """Return the environment variables that must be set before torch is imported."""
    return GPU_ENV if torch.cuda.is_available() else ENGINE_ENV


_PAGE = 128
"""Most tokens of a page of a KV cache."""


@dataclass(frozen=True)
class Samples:
    """Completions in the order of the requests; their tokens end with EOS."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class VllmRollout:
    """An engine that starts with dummy weights and needs a refit before it generates."""

    def __init__(
        self,
        settings: Settings,
        recipe: Recipe,
        folder: Path,
        *,
        stop_ids: list[int],
        length: int,
        seed: int,
    ) -> None:
        missing = [key for key, value in engine_env().items() if os.environ.get(key) != value]
        assert not missing, f"set before importing torch: {missing}"
        from vllm import LLM

        from vllm_fp8rl import engine_args

        self._settings, self._stop_ids = settings, stop_ids
        self._gpu = torch.cuda.is_available()
        self._expect_kv_scales = recipe.kv_cache.has_scales
        sequences = max(settings.sequences, 64)
        each = Sizes(ModelSpec.of(hf_config(settings)), 1).kv_per_token(2, "auto")
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            generation_config="vllm",
            max_model_len=max(length, 32),
            max_num_seqs=sequences,
            kv_cache_memory_bytes=max(64 << 20, each * sequences * _PAGE * cdiv(length, _PAGE)),
            seed=seed,
            logprobs_mode="raw_logprobs",
            disable_log_stats=True,
            **self._device_options(recipe.exact),
            **engine_args(recipe),
        )

    def refit(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> RefitReport:
        """Update weights and KV scales of the live engine."""
        from vllm_fp8rl.refit import refit

        return refit(self._llm, tensors, expect_kv_scales=self._expect_kv_scales)

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Samples:
        """Sample one completion per prompt at temperature 1.

        On a CPU each has its own seed; on a GPU that would take longer than a small model.
        """
        own = [None] * len(seeds) if self._gpu else seeds
        return self._generate(prompts, [self._params(1.0, seed) for seed in own])

    def greedy(self, prompts: Sequence[Sequence[int]]) -> Samples:
        """Complete each prompt with the most probable token at each position."""
        return self._generate(prompts, [self._params(0.0, None)] * len(prompts))

    def close(self) -> None:
        """Shut the engine down."""
        self._llm.llm_engine.engine_core.shutdown()

    def _params(self, temperature: float, seed: int | None):
        from vllm import SamplingParams

        return SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=self._settings.max_new_tokens,
            logprobs=0,
            detokenize=False,
            stop_token_ids=self._stop_ids,
        )

    def _generate(self, prompts: Sequence[Sequence[int]], params: list) -> Samples:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = [r.outputs[0] for r in self._llm.generate(requests, params, use_tqdm=False)]
        tokens = [list(output.token_ids) for output in outputs]
        logprobs = [
            [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
            for ids, output in zip(tokens, outputs, strict=True)
        ]
        return Samples(tokens, logprobs)

    def _device_options(self, exact: bool) -> dict[str, Any]:
        if self._gpu:
            # A tenth of the memory must be free; what the cache takes is given.
            options: dict[str, Any] = {"gpu_memory_utilization": 0.1}
            if not self._settings.compiled:
                graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
                options["compilation_config"] = graphs
            return options
        if exact:
            return {"enforce_eager": True}
        from vllm_fp8rl.testing.trainer_numerics import engine_options

        return {"enforce_eager": True, **engine_options()}
