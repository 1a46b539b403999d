"""What each low-precision step of vLLM's rollouts costs in probability, on heavy-tailed weights.

    python benchmarks/mismatch.py [--variants bf16,linear,...] [--parallel 4] [--out FILE.json]

A Qwen3 made on the spot, whose weights follow Student's t with 4 degrees of freedom and whose norms
amplify a few channels, as in trained LLMs, so that blocks and groups have outliers. Each variant is
an engine in a process of its own that samples with temperature 1; transformers in BF16 then gives
logprobs of the same tokens. ``token_mult_prob_error`` is NeMo RL's metric, 1 is perfect; ``bf16``
is the floor that two engines in BF16 have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fp8rl_bench.facts import versions

SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FREEDOM = 4.0
OUTLIERS = 16  # channels that each norm amplifies
PROMPTS, PROMPT_TOKENS, TOKENS = 64, 128, 256
BATCH = 8  # sequences in one reference forward

BLOCK_FP8 = {"quantization": "fp8_per_block"}


def _ours(cache: str) -> dict[str, Any]:
    import vllm_fp8rl
    from fp8rl import Recipe

    return vllm_fp8rl.engine_args(Recipe.from_dict({"kv_cache": {"dtype": cache}}))


VARIANTS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "bf16": ("BF16", dict),
    "stock": ("vLLM's block FP8 linears", lambda: dict(BLOCK_FP8)),
    "eager": ("FP8 linears, quantized apart", lambda: _ours("auto") | {"enforce_eager": True}),
    "linear": ("FP8 linears, quantization fused", lambda: _ours("auto")),
    "kv-triton": (
        "and FP8 KV cache, Triton attention",
        lambda: _ours("fp8_e4m3") | {"attention_backend": "TRITON_ATTN"},
    ),
    "kv": ("and FP8 KV cache, our decode attention", lambda: _ours("fp8_e4m3")),
    "int8": ("FP8 linears and INT8 KV cache", lambda: _ours("int8_per_token_head")),
    "stock-kv": (
        "vLLM's linears and FP8 KV cache with scale 1.0",
        lambda: BLOCK_FP8 | {"kv_cache_dtype": "fp8_e4m3"},
    ),
}


def make_heavy_tailed(path: Path, layers: int, device: str) -> None:
    """A Qwen3 checkpoint in BF16 with outliers in weights and activations."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **SHAPE))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).float().to(device)
    torch.manual_seed(1)
    student = torch.distributions.StudentT(torch.tensor(FREEDOM, device=device))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            # Logits that prefer a few tokens, as a trained model's do.
            gain = 2.5 if name == "lm_head.weight" else 0.7
            deviation = gain * parameter.shape[1] ** -0.5
            parameter.data = student.sample(parameter.shape) * deviation / 2**0.5
        elif "layernorm" in name:
            chosen = torch.randperm(parameter.numel())[:OUTLIERS].to(device)
            parameter.data[chosen] *= 10
    model.to(torch.bfloat16).save_pretrained(path)


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(5, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


def run_variant(variant: str, path: Path, out: Path) -> None:
    """Sample with one engine; tokens and their logprobs to ``out``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=PROMPT_TOKENS + TOKENS,
        max_num_seqs=PROMPTS,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        seed=0,
        **VARIANTS[variant][1](),
    )
    inputs: Any = [{"prompt_token_ids": p} for p in prompts(SHAPE["vocab_size"])]
    if variant.startswith("kv"):
        from vllm_fp8rl.calibration import calibrate_kv_scales

        calibrate_kv_scales(llm, inputs[:16])
    sampling = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, seed=3
    )
    outputs = [o.outputs[0] for o in llm.generate(inputs, sampling, use_tqdm=False)]
    logprobs = [
        [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)]
        for o in outputs
    ]
    out.write_text(json.dumps({"tokens": [list(o.token_ids) for o in outputs], "lp": logprobs}))


@torch.no_grad()
def reference_logprobs(model: Any, tokens: list[list[int]], device: str) -> torch.Tensor:
    """Of sampled tokens after their prompts, ``[PROMPTS, TOKENS]`` float32."""
    both = [p + t for p, t in zip(prompts(SHAPE["vocab_size"]), tokens, strict=True)]
    rows = []
    for batch in torch.tensor(both, device=device).split(BATCH):
        logits = model(batch).logits[:, PROMPT_TOKENS - 1 : -1].float()
        chosen = batch[:, PROMPT_TOKENS:, None]
        rows.append(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).cpu())
    return torch.cat(rows)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import Qwen3ForCausalLM

    from fp8rl.mismatch import mismatch_metrics

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = options.variants.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_heavy_tailed(folder / "model", options.layers, device)
        torch.cuda.empty_cache()

        def child(variant: str) -> int:
            command = [sys.executable, __file__, "--child", variant, "--folder", name]
            return subprocess.run(command, check=False).returncode

        with ThreadPoolExecutor(options.parallel) as pool:
            codes = dict(zip(names, pool.map(child, names), strict=True))
        model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).to(device)
        result: dict[str, Any] = {}
        for variant in names:
            if codes[variant]:
                result[variant] = {"failed": codes[variant]}
                continue
            made = json.loads((folder / f"{variant}.json").read_text())
            rollout = torch.tensor(made["lp"])
            trainer = reference_logprobs(model, made["tokens"], device)
            metrics = mismatch_metrics(rollout, trainer, torch.ones_like(rollout))
            result[variant] = {"what": VARIANTS[variant][0]} | metrics.to_dict()
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"gpu": gpu, "versions": versions(), "layers": options.layers, "variants": result}


def main() -> None:
    parser = argparse.ArgumentParser(description="Probability error of FP8 rollouts")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1, help="engines at a time")
    parser.add_argument("--out", type=Path, default=Path("mismatch.json"))
    parser.add_argument("--child", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_variant(
            options.child, options.folder / "model", options.folder / f"{options.child}.json"
        )
        return
    found = measure(options)
    options.out.write_text(json.dumps(found, indent=1))
    for variant, metrics in found["variants"].items():
        sys.stdout.write(f"{variant:10} {json.dumps(metrics)}\n")


if __name__ == "__main__":
    main()
