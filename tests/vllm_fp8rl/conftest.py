"""One real engine for the whole session, and the tiny checkpoints that it loads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
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
from vllm_fp8rl.testing.tiny import make_checkpoint

LAYERS = 2
VOCAB = 512
KV_SCALE = 0.05


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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one shape, ``a`` and ``b``."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="session")
def engine(checkpoints: dict[str, Path]) -> Iterator[Engine]:
    """The session's engine: default recipe (FP8 linears, FP8 KV cache), loaded from ``a``.

    A test that refits it must leave it with the weights of ``a`` and every scale at ``KV_SCALE``.
    """
    from vllm_fp8rl.kv_cache import set_uncalibrated_kv_scales

    started = start_engine(checkpoints["a"], Recipe())
    gc.freeze()  # each further engine collects garbage several times: not among all of vLLM's
    set_uncalibrated_kv_scales(started.model, KV_SCALE)
    yield started
    started.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def other_engine(engine: Engine) -> Callable[..., Engine]:
    """``other_engine(path, recipe, **llm_arguments)``: one more engine beside the session's.

    Its KV scales are set, unless the cache is not FP8.
    """
    from vllm_fp8rl.kv_cache import set_uncalibrated_kv_scales

    def start(path: Path, recipe: Recipe, **changes: Any) -> Engine:
        started = start_engine(path, recipe, **changes)
        # When it goes it must not shut down the process groups, which all engines here share.
        started.llm.llm_engine.engine_core._finalizer.detach()
        if recipe.kv_cache.dtype != "auto":
            set_uncalibrated_kv_scales(started.model, KV_SCALE)
        return started

    return start
