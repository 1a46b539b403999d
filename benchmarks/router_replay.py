"""What router replay (R3) takes off the mismatch of a small, trained Qwen3-MoE, on a CPU.

    python benchmarks/router_replay.py [--seeds 0,1,2] [--steps 250] [--out FILE.json]

For each seed a Qwen3-MoE is trained on arithmetic (the demo's problems, one after the other) and
saved in BF16. Each variant is a recipe: an in-process vLLM engine with it samples with temperature
1, and its routers are recorded; then Megatron-Core with the same recipe gives logprobs of the same
tokens, once with its own routes and once with the replayed ones. Both engines compute in BF16. The
tokens of an FP8 KV cache are scored twice: over the trainer's own keys and values, and over them as
the cache holds them (``kv_cache.in_training``).
``token_mult_prob_error`` is NeMo RL's metric, 1 is perfect; ``kl_k3`` estimates KL(rollout,
trainer).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from facts import versions
from processes import save

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTH, BATCH = 96, 16  # of training
PROMPT_TOKENS, TOKENS, SEQUENCES = 24, 72, 64
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": (
        "BF16",
        {"rollout": False, "training": False, "kv_cache": {"dtype": "auto"}},
    ),
    "fp8": ("FP8 linears and experts", {"kv_cache": {"dtype": "auto"}}),
    "fp8-kv": ("and FP8 KV cache", {}),
}


def text(seed: int, rows: int, length: int) -> torch.Tensor:
    """Token numbers ``[rows, length]`` of problems with their answers, one after the other."""
    import random

    from fp8rl_demo.tasks import load_problems
    from fp8rl_demo.tokenizer import CharTokenizer

    problems, tokenizer, choose = load_problems("train"), CharTokenizer(), random.Random(seed)

    def row() -> list[int]:
        found = ""
        while len(found) < length:
            problem = choose.choice(problems)
            found += f"{problem.prompt}{problem.answer} "
        return tokenizer.encode(found[:length], add_bos=False)

    return torch.tensor([row() for _ in range(rows)])


def train(folder: Path, seed: int, steps: int) -> float:
    """Train in float32, save in BF16 and return the last loss."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, output_router_logits=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - 0.9 * step / steps)
    )
    loss = torch.zeros(())
    for step in range(steps):
        batch = text(seed * 100_000 + step, BATCH, LENGTH)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            sys.stderr.write(f"seed {seed} step {step} loss {loss.item():.3f}\n")
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder)
    return loss.item()


def roll_out(variant: str, seed: int, model: Path, out: Path) -> None:
    """Sample with one engine and write tokens, logprobs and routes to ``out``."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm import LLM, SamplingParams

    import vllm_fp8rl
    from fp8rl import Recipe
    from vllm_fp8rl.testing.routes import RouteRecorder

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=PROMPT_TOKENS + TOKENS + 1,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * PROMPT_TOKENS,
        kv_cache_memory_bytes=32 << 20,
        enable_prefix_caching=False,
        seed=seed,
        **vllm_fp8rl.engine_args(Recipe.from_dict(VARIANTS[variant][1])),
    )
    inputs: list[Any] = [
        {"prompt_token_ids": row} for row in text(7 + seed, SEQUENCES, PROMPT_TOKENS).tolist()
    ]
    kv_scales = {}
    if variant == "fp8-kv":
        from vllm_fp8rl.calibration import calibrate_kv_scales

        whole = text(9 + seed, 16, PROMPT_TOKENS + TOKENS).tolist()
        kv_scales = calibrate_kv_scales(llm, [{"prompt_token_ids": row} for row in whole])
    worker: Any = llm.llm_engine.model_executor.driver_worker.worker
    recorder = RouteRecorder(worker.model_runner.model)
    sampling = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, seed=seed
    )
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    logprobs = [
        [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)]
        for o in (output.outputs[0] for output in outputs)
    ]
    # Sequences of one length that start together stay together: their prompts, then one token each.
    routes = recorder.take()
    prompts = routes[: SEQUENCES * PROMPT_TOKENS].unflatten(0, (SEQUENCES, PROMPT_TOKENS))
    steps = routes[SEQUENCES * PROMPT_TOKENS :].unflatten(0, (TOKENS - 1, SEQUENCES))
    torch.save(
        {
            "tokens": torch.tensor(
                [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
            ),
            "logprobs": torch.tensor(logprobs),
            "routes": torch.cat([prompts, steps.transpose(0, 1)], dim=1),
            "kv_scales": kv_scales,
        },
        out,
    )


@torch.no_grad()
def score(variant: str, model: Path, rollout: Path, out: Path) -> None:
    """Compare with Megatron-Core's logprobs of the same tokens, with and without replay."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig

    from fp8rl import Recipe
    from fp8rl.mismatch import mismatch_metrics
    from megatron_fp8rl import convert
    from megatron_fp8rl.export import load_hf
    from megatron_fp8rl.kv_cache import KVCacheInTraining
    from megatron_fp8rl.router_replay import ReplayedRoutes
    from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo
    from megatron_fp8rl.testing.models import build_gpt

    made = torch.load(rollout)
    tokens, routes = made["tokens"], made["routes"]
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    with CpuShim().active():
        init_gloo()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        gpt = build_gpt(Qwen3MoeConfig.from_pretrained(model), moe_enable_routing_replay=True)
        load_hf(gpt, load_file(model / "model.safetensors"))
        convert(gpt, Recipe.from_dict(VARIANTS[variant][1]))
        gpt.eval()
        counter = ReplayedRoutes(gpt)

        def logprobs() -> torch.Tensor:
            found = torch.log_softmax(gpt(inputs, positions, None).float(), -1)
            return found.gather(-1, targets[..., None])[:, PROMPT_TOKENS - 1 :, 0]

        def compare() -> dict[str, Any]:
            RouterReplay.clear_global_router_replay_action()
            own = logprobs()
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            replayed = logprobs()
            mask = torch.ones_like(own)
            return {
                "own": mismatch_metrics(made["logprobs"], own, mask).to_dict(),
                "replayed": mismatch_metrics(made["logprobs"], replayed, mask).to_dict(),
                "routes": counter.metrics(),
            }

        layers = routes.transpose(0, 1).flatten(0, 1).unbind(1)  # Megatron has the sequence first
        RouterReplay.set_replay_data([layer.contiguous() for layer in layers])
        found = {"what": VARIANTS[variant][0]} | compare()
        if made["kv_scales"]:
            KVCacheInTraining(gpt).set(made["kv_scales"])
            found["in_training"] = compare()
    out.write_text(json.dumps(found))


def stage(*arguments: str) -> None:
    """Run one stage in a process of its own: vLLM and Megatron share no process group."""
    subprocess.run([sys.executable, __file__, "--child", *arguments], check=True)


def measure(seed: int, steps: int) -> dict[str, Any]:
    """All variants on the model of one seed."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.perf_counter()
        found: dict[str, Any] = {"loss": train(folder, seed, steps)}
        for variant in VARIANTS:
            rollout, result = folder / f"{variant}.pt", folder / f"{variant}.json"
            stage("roll_out", variant, str(seed), name, str(rollout))
            stage("score", variant, name, str(rollout), str(result))
            found[variant] = json.loads(result.read_text())
    return found | {"seconds": time.perf_counter() - began}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        name, *arguments = sys.argv[2:]
        if name == "roll_out":
            variant, seed, model, out = arguments
            roll_out(variant, int(seed), Path(model), Path(out))
        else:
            variant, model, rollout, out = arguments
            score(variant, Path(model), Path(rollout), Path(out))
        return
    parser = argparse.ArgumentParser(description="Mismatch of a Qwen3-MoE with router replay")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=Path("router_replay.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {"versions": versions(), "shape": SHAPE, "steps": options.steps}
    seeds = found["seeds"] = {}
    for seed in options.seeds.split(","):
        seeds[seed] = measure(int(seed), options.steps)
        save(found, options.out, {"seed": seed} | seeds[seed])


if __name__ == "__main__":
    main()
