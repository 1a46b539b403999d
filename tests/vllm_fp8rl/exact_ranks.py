"""Run by test_exact.py: two ranks of an engine sample, then two ranks of a trainer score.

Arguments: ``rollout`` or ``trainer``; folder with the checkpoint, to which samples are written; the
recipe.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # 'auto' wants a NUMA node a rank

import torch
from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.kv_scales import scale_names

SCALES = {name: torch.tensor(2.0**-6) for name in scale_names(2, ("k", "v"))}


def rollout(folder: Path, recipe: Recipe) -> None:
    """Sample batches of several sizes, over chunked and cached prompts, after a refit."""
    from support.engine import start_engine
    from support.processes import fork_engines
    from support.sampled import sampled
    from vllm_fp8rl.refit import refit

    fork_engines()
    engine = start_engine(
        folder,
        recipe,
        tensor_parallel_size=2,
        dtype="bfloat16",
        max_model_len=128,
        max_num_batched_tokens=40,
        enable_prefix_caching=True,
    )
    tensors = load_file(folder / "model.safetensors")
    scales = SCALES if recipe.kv_cache.has_scales else {}
    refit(engine.llm, chain(tensors.items(), scales.items()), expect_kv_scales=bool(scales))
    torch.manual_seed(0)
    prompts = [torch.randint(2, 512, (n,)).tolist() for n in (60, 7, 33, 50, 1)]
    found = []
    for batch in (prompts, prompts[:1], prompts[1:3]):
        found += sampled(engine.llm, batch, [12] * len(batch), temperature=1.0)
    torch.save(found, folder / "samples.pt")
    engine.llm.llm_engine.engine_core.shutdown()


def trainer(folder: Path, recipe: Recipe) -> None:
    """Score them on two ranks, on one for contrast, and in two pipeline stages."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_fp8rl.testing.cpu_shim import CpuShim
    from support.launch import join

    torch.set_num_threads(1)
    join()
    samples = torch.load(folder / "samples.pt")
    grads = {}
    with CpuShim().active():
        for ranks, sharded in ((1, False), (2, False), (2, True)):
            parallel_state.initialize_model_parallel(ranks)
            model_parallel_cuda_manual_seed(1)
            model = built(folder, recipe, sequence_parallel=sharded)
            with torch.no_grad():
                alone = torch.cat([scored(model, [sample])[0] for sample in samples])
                packed = torch.cat(scored(model, samples))
            theirs = torch.cat([logprobs for _, logprobs in samples])
            assert torch.equal(packed, alone)
            if ranks == 2:
                assert torch.equal(alone, theirs), (sharded, (alone == theirs).float().mean())
            else:  # two ranks round more often, or the test sees nothing
                assert (alone == theirs).float().mean() < 0.5
                whole = alone
            plain = built(folder / "plain", recipe, sequence_parallel=sharded)
            grads[ranks, sharded] = gradient(plain, samples)
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 2)
        model_parallel_cuda_manual_seed(1)
        first = parallel_state.is_pipeline_first_stage()
        stage = built(folder, recipe, pre_process=first, post_process=not first)
        with torch.no_grad():
            found = scored(stage, samples)
        assert first or torch.equal(torch.cat(found), whole)
        parallel_state.destroy_model_parallel()
    one = grads[1, False]  # of weights without heavy tails, where a rounding changes little
    off = {case: float((grad - one).norm() / one.norm()) for case, grad in grads.items()}
    assert max(off.values()) < 0.3, off  # without the sum over ranks it is above 0.5
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the process
    sys.stdout.write("equal\n")


def built(folder: Path, recipe: Recipe, **options: Any) -> Any:
    from megatron_fp8rl import convert
    from megatron_fp8rl.kv.cache import KVCacheInTraining
    from support.megatron import hf_gpt

    model = hf_gpt(folder, torch.bfloat16, bias_activation_fusion=True, **options)
    convert(model, recipe)
    if recipe.kv_cache.dtype != "auto":
        cache = KVCacheInTraining(model, recipe.kv_cache.dtype)
        if recipe.kv_cache.has_scales:
            cache.set(SCALES)
    return model


def scored(model: Any, samples: list[tuple[list[int], torch.Tensor]]) -> list[torch.Tensor]:
    """NeMo RL's logprobs of the sampled tokens; empty of a stage that another one follows."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from nemo_rl_ext.workers.logprobs import ExactLogprob

    rows = [tokens for tokens, _ in samples]
    lengths = [*map(len, rows)]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packing = PackedSeqParams("thd", starts, starts, None, None, max(lengths), max(lengths))
    tokens = torch.tensor([*chain(*rows), *([0] * (sum(lengths) % 2))])  # ranks have equal parts
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(sum(lengths) % 2)]).long()
    if not model.pre_process:
        hidden = torch.empty(len(tokens), 1, model.config.hidden_size, dtype=torch.bfloat16)
        torch.distributed.recv(hidden, 0)
        model.set_input_tensor(hidden)
    logits = model(tokens[None], positions[None], None, packed_seq_params=packing)
    if not model.post_process:
        torch.distributed.send(logits, 1)
        return []
    group = parallel_state.get_tensor_model_parallel_group()
    words = logits.shape[-1]
    first = group.rank() * words
    found = ExactLogprob.apply(
        logits, tokens.roll(-1)[None], first, first + words, 16, group, False
    )[0]
    ends = starts[1:].tolist()
    return [found[e - 1 - len(s[1]) : e - 1] for e, s in zip(ends, samples, strict=True)]


def gradient(model: Any, samples: list[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """Of the first norm's weight, to which all gradients flow."""
    from megatron.core import parallel_state

    model.train()
    torch.cat(scored(model, samples)).sum().backward()
    grad = model.decoder.layers[0].input_layernorm.weight.grad.float()
    if model.config.sequence_parallel:  # as Megatron does at the end of a step
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(grad, group=group)
    return grad


if __name__ == "__main__":
    run = {"rollout": rollout, "trainer": trainer}[sys.argv[1]]
    run(Path(sys.argv[2]), Recipe.from_dict(json.loads(sys.argv[3])))
