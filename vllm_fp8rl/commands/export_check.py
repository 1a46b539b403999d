"""Compare an exported block-FP8 folder with the checkpoint that it was made from, by logprobs.

On a GPU that vLLM serves, stock vLLM loads the folder and vLLM with fp8rl the checkpoint. Elsewhere
transformers computes both in float32, with the values fake-quantized as the engine would: then both
agree to rounding, and the check is one of the folder. Importing this module imports no engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.export import wire_scale_name
from fp8rl.models.folder import folder_spec, folder_tensors
from fp8rl.plugins.adapters import Diagnosis
from fp8rl.weight_files import WeightFile
from vllm_fp8rl import engine_args
from vllm_fp8rl.compat import TESTED, built_for_cpus, installed_version

_SEQUENCES, _LENGTH = 4, 64
_MEMORY = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
"""Arguments of an engine that takes no more of a GPU than its weights and these few tokens need; by
default vLLM takes nine tenths of it, and does not start beside others. The second key is only what
must be free where the first is set."""
_MOST_ENGINES, _MOST_FP8_CACHE, _MOST_REFERENCE = 0.05, 0.1, 1e-6
"""Mean absolute differences of logprobs in nats that are allowed. Kernels of one precision differ
by about a tenth of the first. Over an FP8 cache stock vLLM quantizes the queries of prompts too,
which fp8rl leaves in 16 bits: in a random model of two layers that alone is 0.06. transformers
computes both sides alike."""


def check_export(checkpoint: Path, out: Path, recipe: Recipe) -> Diagnosis:
    """Compare teacher-forced logprobs of random tokens.

    Args:
        checkpoint: folder of the BF16 model.
        out: folder that ``fp8rl export`` wrote.
        recipe: recipe of the export.

    Returns:
        What was compared, mean and largest difference as facts, and a problem if they differ.
    """
    vocabulary = folder_spec(checkpoint).numbers["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (_SEQUENCES, _LENGTH), generator=generator)
    engines = installed_version() is not None and not built_for_cpus() and torch.cuda.is_available()
    if engines:
        found = _of_engines(checkpoint, out, recipe, tokens.tolist())
        compared = "stock vLLM with OUT, vLLM with fp8rl with CHECKPOINT"
        most = _MOST_FP8_CACHE if recipe.kv_cache.has_scales else _MOST_ENGINES
    else:
        found = _of_transformers(checkpoint, out, recipe, tokens)
        compared = "transformers, fake-quantized, with OUT and with CHECKPOINT"
        most = _MOST_REFERENCE
    difference = (found[0].double() - found[1].double()).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    problems = []
    if not mean <= most:  # a NaN is a problem
        problems.append(
            f"The logprobs of '{out}' differ by {mean:.2e} nats in the mean from those of "
            f"'{checkpoint}', more than {most:g}; export again with the recipe of the rollouts, "
            "and compare the KV scales."
        )
    facts = {
        "compared": compared,
        "tokens": str(difference.numel()),
        "difference of logprobs": f"mean {mean:.2e}, largest {largest:.2e} nats",
    }
    return Diagnosis(installed_version() or "not installed", TESTED, facts, tuple(problems))


def _of_transformers(
    checkpoint: Path, out: Path, recipe: Recipe, tokens: torch.Tensor
) -> list[torch.Tensor]:
    try:
        from vllm_fp8rl.testing.hf_reference import load_exported, load_reference
    except ImportError as error:
        raise UnsupportedError(
            f"--check needs transformers where there is no vLLM for a GPU ({error}); install it, "
            "or leave --check out."
        ) from None
    exported = load_exported(out, recipe)
    scales = exported.kv_scales
    theirs = exported.teacher_forced_logprobs(tokens)
    del exported  # one model in memory at a time
    return [
        theirs,
        load_reference(checkpoint, recipe, kv_scales=scales).teacher_forced_logprobs(tokens),
    ]


def _of_engines(
    checkpoint: Path, out: Path, recipe: Recipe, tokens: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    scales = _stored_scales(out) if recipe.kv_cache.has_scales else {}
    settings = {
        # With its default vLLM rounds the scales of weights to powers of two on its own.
        "VLLM_USE_DEEP_GEMM_E8M0": str(int(recipe.weights.scale_format == "pow2")),
        # Stock vLLM compiles thousands of kernels one by one, of which these tokens need a few.
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    cache = "fp8" if scales else "auto"
    stock = EngineJob(out, {**_MEMORY, "kv_cache_dtype": cache}, environment=settings)
    source = EngineJob(checkpoint, {**_MEMORY, **engine_args(recipe)}, scales)
    return run_engines([stock, source], tokens)


@dataclass(frozen=True)
class EngineJob:
    """An engine to start."""

    folder: Path
    arguments: Mapping[str, Any]
    """Arguments of ``vllm.LLM``."""
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    """KV scales to send to it; only an engine with fp8rl takes any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set before vLLM is imported."""


def run_engines(jobs: Sequence[EngineJob], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return each engine's logprobs of all tokens but the first of each prompt.

    The engines run one after the other, each in a process of its own, whose end frees its GPU
    memory.
    """
    found = []
    for job in jobs:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(torch.tensor(pool.submit(_logprobs, job, tokens).result()))
    return found


def _stored_scales(folder: Path) -> dict[str, float]:
    scales = {}
    for name, file in (folder_tensors(folder) or {}).items():
        if (wire := wire_scale_name(name)) is not None:
            for _, scale in WeightFile(file).read([name]):
                scales[wire] = scale.item()
    return scales


def _logprobs(job: EngineJob, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    os.environ.update(
        job.environment, VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )  # the engine in this process
    from vllm import LLM, SamplingParams

    from vllm_fp8rl.calibration import send_kv_scales

    llm = LLM(
        model=str(job.folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2 * _LENGTH,
        **job.arguments,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts: Any = [{"prompt_token_ids": list(prompt)} for prompt in tokens]
    try:
        if job.kv_scales:
            send_kv_scales(llm, job.kv_scales)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return [
        [
            entry[token].logprob
            for token, entry in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
            if entry is not None
        ]
        for prompt, output in zip(tokens, outputs, strict=True)
    ]
