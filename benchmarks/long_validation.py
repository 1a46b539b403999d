"""Right answers of one model under each precision of rollouts: what FP8 itself spoils of long ones.

    python benchmarks/long_validation.py --model FOLDER [--programs 24,40] [--count 1024]
        [--variants bf16,fp8rl,fp8rl-kv] [--recipe JSON] [--cache 1] [--out FILE.json]

GRPO in FP8 may end at other answers than in BF16 because the engine answers otherwise, or because
the policy has learned otherwise. Here the weights are the same: each variant's engine answers the
same held-out programs (``long_tasks.py``) once each at temperature 1. The model is one of
``long_model.py`` (with ``--slips 0`` its answers are wrong by its own mistakes alone) or a
checkpoint of a run that was converted to a Hugging Face folder. Variants have the names of
``rollout.py``: ``fp8rl-kv`` has an FP8 KV cache, as ``fp8rl`` has in ``nemo_rl.py``; its scales are
calibrated from right answers to other programs. ``--recipe`` has more keys of the recipe for
fp8rl's variants, such as ``{"pins": {"kinds": ["qkv_proj"]}}``. Printed for each variant are the
share of right answers with its standard error, and what is wrong first in the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from facts import versions
from long_tasks import (
    LongTokenizer,
    answer_length,
    bounds,
    demonstration,
    outcome,
    problems,
    prompt_length,
)
from nemo_rl_long import graphs
from processes import in_process, save
from rollout import VARIANTS, engine_arguments

CALIBRATED_FROM = 32
"""Programs with right answers."""
AT_ONCE = 256


def run_variant(options: argparse.Namespace) -> dict[str, Any]:
    """Let one engine answer all programs.

    Args:
        options: of the command line; ``child`` is the variant.

    Returns:
        The variant, the GPU's name (None on a CPU), ``count``, the share of ``right`` answers, its
        ``standard_error``, the number of others by what is wrong first (``long_tasks.outcome``),
        ``tokens`` of all answers, and the ``seconds`` that they took.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    shortest, longest = options.programs
    tokenizer = LongTokenizer()
    on_gpu = torch.cuda.is_available()
    here: dict[str, Any] = {"enforce_eager": True}
    if on_gpu:  # others may use it too, so that its free memory tells nothing
        here = {"gpu_memory_utilization": 0.05} | graphs(AT_ONCE)
    llm = LLM(
        str(options.model),
        max_model_len=prompt_length(longest) + answer_length(longest),
        max_num_seqs=AT_ONCE,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=int(options.cache * 2**30),
        seed=options.seed,
        **here,
        **engine_arguments(options.child, options.recipe),
    )
    if options.child.endswith("-kv"):
        from vllm_fp8rl.calibration import calibrate_kv_scales

        choose = random.Random("calibration")
        others = problems("calibration", CALIBRATED_FROM, options.seed, shortest, longest)
        texts = [p.prompt + demonstration(p.prompt, choose) for p in others]
        calibrate_kv_scales(llm, [tokenizer.encode(text, add_bos=False) for text in texts])
    held_out = list(problems("validation", options.count, options.seed, shortest, longest))
    prompts = [
        {"prompt_token_ids": tokenizer.encode(asked.prompt, add_bos=False)} for asked in held_out
    ]
    began = time.perf_counter()
    told = llm.generate(
        prompts,
        [
            SamplingParams(max_tokens=answer_length(asked.prompt.count("#")), detokenize=False)
            for asked in held_out
        ],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - began
    answers = [request.outputs[0].token_ids for request in told]
    outcomes = Counter(
        outcome(asked.prompt, tokenizer.decode(answer))
        for asked, answer in zip(held_out, answers, strict=True)
    )
    right = outcomes.pop("right", 0) / options.count
    return {
        "variant": options.child,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "count": options.count,
        "right": right,
        "standard_error": math.sqrt(right * (1 - right) / options.count),
        "mistakes": dict(outcomes),
        "tokens": sum(map(len, answers)),
        "seconds": round(seconds, 1),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Right answers by precision, with equal weights")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--programs", type=bounds, default=(24, 40), metavar="SHORTEST,LONGEST")
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--variants", default="bf16,fp8rl,fp8rl-kv")
    parser.add_argument("--recipe", type=json.loads, default={}, help="JSON; keys of fp8rl's")
    parser.add_argument("--seed", type=int, default=0, help="of problems and samples")
    parser.add_argument("--cache", type=float, default=1.0, help="GiB of the KV cache")
    parser.add_argument("--out", type=Path, default=Path("long_validation.json"))
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.child:
        options.out.write_text(json.dumps(run_variant(options)), encoding="utf-8")
        return 0
    results: list[dict[str, Any]] = []
    found = {
        "versions": versions(),
        "programs": options.programs,
        "recipe": options.recipe,
        "results": results,
    }
    for variant in options.variants.split(","):
        results.append(in_process(variant))
        save(found, options.out, results[-1])
    return int(any("failed" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
