"""What a rollout takes on the host: vLLM's scheduler and outputs around a model of next to nothing.

    python benchmarks/rollout_host.py [--requests 256] [--tokens 1024] [--repeats 3]
                                      [--out FILE.json]

An in-process vLLM engine on a CPU generates from a Qwen3 of one layer of 64 units and 1,024 words,
and gives the log-probability of each sampled token, as NeMo RL asks for. The ways to give them take
turns in one engine, in this order: a dict and an object a token, as upstream has it; the same with
Python's garbage collector paused; and flat lists (``SamplingParams.flat_logprobs``), as fp8rl's
workers have it. The time has the model's own in it, which is the same for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from facts import host_loop, versions
from processes import save
from profiles import garbage_collections

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT_TOKENS = 16
WAYS = {
    "dicts": {"flat": False, "collect": True},
    "dicts, collector paused": {"flat": False, "collect": False},
    "flat": {"flat": True, "collect": True},
}


def measure(llm: Any, options: argparse.Namespace, *, flat: bool, collect: bool) -> dict[str, Any]:
    """Return the seconds of one rollout."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=options.tokens, logprobs=0, ignore_eos=True, flat_logprobs=flat
    )
    prompts = [{"prompt_token_ids": [3 + i] * PROMPT_TOKENS} for i in range(options.requests)]
    gc.collect()
    if not collect:
        gc.disable()
    try:
        with garbage_collections() as seen:
            began, used = time.perf_counter(), time.thread_time()
            llm.generate(prompts, params, use_tqdm=False)
            seconds, cpu = time.perf_counter() - began, time.thread_time() - used
    finally:
        gc.enable()
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu, 3),
        "collections": len(seen),
        "collection_seconds": round(sum(each.seconds for each in seen), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("rollout_host.json"))
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=PROMPT_TOKENS + options.tokens,
            max_num_seqs=options.requests,
            enforce_eager=True,
        )
        found: dict[str, Any] = {
            "versions": versions(),
            "options": {name: getattr(options, name) for name in ("requests", "tokens")},
            "host_loop_ms": host_loop(),
            "rounds": [],
        }
        measure(llm, options, **WAYS["flat"])
        for _ in range(options.repeats):
            found["rounds"].append({way: measure(llm, options, **how) for way, how in WAYS.items()})
            save(found, options.out, found["rounds"][-1])
    tokens = options.requests * options.tokens
    for way in WAYS:
        seconds = statistics.median(each[way]["seconds"] for each in found["rounds"])
        found.setdefault("microseconds_a_token", {})[way] = round(1e6 * seconds / tokens, 2)
    save(found, options.out, found["microseconds_a_token"])


if __name__ == "__main__":
    main()
