"""``exact`` on a CPU: vLLM samples in any batch, Megatron scores, and every bit is the same.

One trainer and one engine for each model and cache, as in a loop of GRPO: chunked prompts, cached
prefixes, requests that are preempted, and a refit with weights that the trainer has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file, save_file

from fp8rl import PluginManager, Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.kernels import implementation, reference
from fp8rl.kv_scales import scale_names
from fp8rl.models.spec import ModelSpec
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.testing.cpu_shim import CpuShim
from support.engine import Engine
from support.megatron import hf_gpt, one_process
from support.processes import run_forked, run_ranks
from support.sampled import sampled
from support.tiny import make_family_checkpoint
from vllm_fp8rl.kernels import exact
from vllm_fp8rl.refit import refit

RANKS = Path(__file__).with_name("exact_ranks.py")
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
MODELS = {"llama": SHAPE | {"head_dim": 64}, "qwen3": SHAPE | {"head_dim": 128}}
CACHES = ("fp8_e4m3", "int8_per_token_head", "auto")
QUICK = {("llama", "fp8_e4m3"), ("qwen3", "int8_per_token_head")}
SMALL = {
    "dtype": "bfloat16",
    "block_size": 32,
    "max_model_len": 128,
    "num_gpu_blocks_override": 8,  # of which six requests at once need more
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,  # most prompts come in chunks
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}
BATCHES = [
    [(0, 1, 1)],
    [(0, 20, 16), (1, 40, 7), (1, 40, 3), (2, 9, 1)],
    [(0, 20, 16), (1, 20, 16), (2, 20, 16)] * 2,
]
"""Requests: which text the prompt begins with, its tokens after the first 40, those to sample."""

Sequence = tuple[list[int], torch.Tensor]
"""Token numbers, and the rollout's log-probabilities of the last ones."""


def checkpoint(path: Path, model: str, **changes: int) -> Path:
    """A random model whose weights have heavy tails, as those of trained ones do."""
    make_family_checkpoint(path, 0, model, **MODELS[model] | changes)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = tensor * torch.randn(tensor.shape).exp().bfloat16()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def scales_of(dtype: str, factor: float) -> dict[str, torch.Tensor]:
    """KV scales of an FP8 cache, of which one is no power of two."""
    names = scale_names(2, ("k", "v")) if dtype == "fp8_e4m3" else []
    return {name: torch.tensor(factor * (0.7 if i == 1 else 1)) for i, name in enumerate(names)}


class Loop:
    """An engine and a trainer of one model."""

    def __init__(self, engine: Engine, trainer: Any, cache: KVCacheInTraining | None) -> None:
        self.llm, self.trainer, self.cache = engine.llm, trainer, cache

    def counted(self, name: str) -> int:
        return next(int(m.value) for m in self.llm.get_metrics() if m.name == f"vllm:{name}")

    def send(self, scales: dict[str, torch.Tensor]) -> None:
        """Refit the engine with the trainer's weights."""
        self.trainer.eval()
        wire = chain(export_hf(self.trainer), scales.items())
        refit(self.llm, wire, expect_kv_scales=bool(scales))
        if self.cache is not None and scales:
            self.cache.set(scales)

    def sample(self, batch: list[tuple[int, int, int]]) -> list[Sequence]:
        """Sample a batch of requests, twice: the second time prefixes are cached."""
        self.llm.reset_prefix_cache()
        torch.manual_seed(0)
        texts = torch.randint(2, 512, (3, 100)).tolist()
        prompts = [texts[text][: 40 + length] for text, length, _ in batch]
        counts = [count for *_, count in batch]
        return [s for _ in range(2) for s in sampled(self.llm, prompts, counts, temperature=1.0)]

    def logits(self, *rows: list[int]) -> torch.Tensor:
        """Logits ``[rows, longest, vocabulary]`` of a batch that is padded on the right."""
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return self.trainer(tokens, torch.arange(longest).expand(len(rows), -1), None)

    def packed(self, *rows: list[int]) -> torch.Tensor:
        """Logits ``[tokens, vocabulary]`` of sequences in a row."""
        starts = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=max(map(len, rows)),
            max_seqlen_kv=max(map(len, rows)),
        )
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        tokens = torch.tensor(list(chain(*rows)))
        return self.trainer(tokens[None], positions[None], None, packed_seq_params=packing)[0]


def scored(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The trainer's log-probabilities of a sequence's sampled tokens."""
    tokens, sampled = sequence
    first = len(tokens) - len(sampled)
    rows, ids = logits[first - 1 : len(tokens) - 1], torch.tensor(tokens[first:])
    return implementation(rows, "logprobs").token_logprobs(rows, ids)[0]


@pytest.fixture(scope="module")
def shim(engine: Engine) -> Iterator[CpuShim]:
    """Megatron beside the engines of this process, whose process groups exist already."""
    with one_process() as opened:
        yield opened


@pytest.fixture
def make_loop(
    tmp_path: Path, shim: CpuShim, other_engine: Callable[..., Engine]
) -> Iterator[Callable[..., Loop]]:
    def make(model: str, dtype: str) -> Loop:
        folder = checkpoint(tmp_path / model, model)
        recipe = Recipe.from_dict({"exact": True, "kv_cache": {"dtype": dtype}})
        engine = other_engine(folder, recipe, scaled=False, **SMALL)
        trainer = hf_gpt(folder, torch.bfloat16, bias_activation_fusion=True)
        convert(trainer, recipe)
        rounds = recipe.kv_cache.dtype != "auto"
        cache = KVCacheInTraining(trainer, recipe.kv_cache.dtype) if rounds else None
        loop = Loop(engine, trainer, cache)
        loop.send(scales_of(dtype, 2.0**-6))
        return loop

    with shim.active():
        yield make


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(MODELS, CACHES)
    ],
)
def test_logprobs_are_the_rollouts(model, dtype, make_loop):
    loop = make_loop(model, dtype)

    def check(batch: list[tuple[int, int, int]]) -> list[Sequence]:
        sequences = loop.sample(batch)
        rows = [tokens for tokens, _ in sequences]
        with torch.no_grad():
            together, packed = loop.logits(*rows), loop.packed(*rows).split([*map(len, rows)])
            for number, sequence in enumerate(sequences):
                logits = packed[number]
                assert torch.equal(scored(logits, sequence), sequence[1])
                assert torch.equal(together[number][: len(logits)], logits)
                if number % 3 == 0:
                    assert torch.equal(loop.logits(sequence[0])[0], logits)
        return sequences

    for batch in BATCHES:
        sequences = check(batch)
    assert loop.counted("num_preemptions") and loop.counted("prefix_cache_hits")

    loop.trainer.train()
    for tokens, _ in sequences[:2]:
        logits = loop.logits(tokens)
        with torch.no_grad():
            assert torch.equal(loop.logits(tokens), logits)
        logits.float().log_softmax(-1)[0, :, 7].sum().backward()
    with torch.no_grad():
        for parameter in loop.trainer.parameters():
            assert parameter.grad.isfinite().all() and parameter.grad.any()
            parameter -= 1e-2 * parameter.grad / parameter.grad.norm() * parameter.norm()
    loop.send(scales_of(dtype, 2.0**-5))
    changed = check(BATCHES[1])
    assert not torch.equal(changed[0][1], sequences[0][1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "dtype"), [("llama", "auto"), ("qwen3", "fp8_e4m3")])
def test_logprobs_of_two_ranks_are_the_rollouts(model, dtype, tmp_path):
    """Both engines over two tensor-parallel ranks, the trainer with sequence parallelism too."""
    folder = checkpoint(tmp_path / model, model, intermediate_size=512)
    make_family_checkpoint(folder / "plain", 0, model, **MODELS[model] | {"intermediate_size": 512})
    recipe = json.dumps({"exact": True, "kv_cache": {"dtype": dtype}})
    done = run_forked(RANKS, "rollout", folder, recipe, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    found = run_ranks(RANKS, 2, "trainer", folder, recipe, timeout=240)
    assert [text.splitlines()[-1] for text in found] == ["equal"] * 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dtype", torch.float16, r"dtype torch\.bfloat16 .* set it to bfloat16"),
        ("logprobs_mode", "raw_logits", "logprobs_mode 'raw_logprobs' .* leave it unset"),
        ("head_dtype", torch.float32, "head_dtype .* leave it out of hf_overrides"),
        ("is_multimodal_model", True, "is_multimodal_model False .* model of text alone"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size 1 .* set it to 1"),
        ("decode_context_parallel_size", 2, "decode_context_parallel_size 1 .* set it to 1"),
        ("speculative_config", SimpleNamespace(method="ngram"), "speculative_config .* unset"),
        ("lora_config", object(), "enable_lora False .* leave it unset"),
        ("get_sliding_window", lambda: 64, "sliding_window None .* not 64; choose another model"),
        ("linear_backend", "cutlass", "linear_backend 'auto' .* leave it unset"),
        ("device_type", "cuda", r"a GPU of .* \(9, 0\) .* use a Hopper GPU"),
    ],
)
def test_a_setting_that_exact_does_not_serve_is_refused(key, value, said):
    """Of what is read of vLLM's config, of which a CPU cannot make each one."""
    part = SimpleNamespace(
        dtype=torch.bfloat16,
        logprobs_mode="raw_logprobs",
        head_dtype=torch.bfloat16,
        is_multimodal_model=False,
        get_sliding_window=lambda: None,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        linear_backend="auto",
        device_type="cpu",
    )
    names = ("model_config", "parallel_config", "kernel_config", "device_config")
    made = SimpleNamespace(**dict.fromkeys(names, part), use_v2_model_runner=True)
    made.speculative_config = made.lora_config = None
    setattr(made if hasattr(made, key) else part, key, value)
    policy = PluginManager().pin_policy(Recipe().pins, ModelSpec.dense(1).names)
    with pytest.raises(UnsupportedError, match=f"exact needs {said}.*, or set exact to false in"):
        exact.check_exact(made, policy)


def test_a_head_whose_sums_depend_on_the_batch_is_refused(monkeypatch):
    monkeypatch.setattr(exact.head, "ROWS", 8)
    monkeypatch.setattr(exact.head, "FEW_WORDS", 99)
    monkeypatch.setattr(exact.head, "multiply", lambda x, w_t: reference.multiply(x, w_t.t()))
    linear = torch.nn.functional.linear
    seen = []

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return linear(x, weight) * 2 if len(x) == wrong else reference.multiply(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", multiply)
    wrong = 0
    exact._check_head(100, 16, most=12, device="cpu")
    exact._check_head(320, 16, most=1, ranks=2, device="cpu")
    assert seen == [*[(128, 16)] * 12, (160, 16)]  # as vLLM pads a vocabulary
    wrong = 11
    with pytest.raises(UnsupportedError, match=r"multiplies 11 rows with \[100, 16\] in another"):
        exact._check_head(100, 16, most=12, device="cpu")
