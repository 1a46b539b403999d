"""Accuracy and rollout/trainer mismatch of the demo, for each precision, over several seeds.

    python benchmarks/accuracy.py [--seeds 0,1,2] [--steps 40] [--out out/accuracy]

Runs ``fp8rl demo --compare bf16,fp8-rollout,fp8`` once a seed with the real engines, the two FP8
precisions once more with a BF16 KV cache, which tells the linear layers' share of the mismatch from
the cache's, and ``fp8`` with a trainer that attends over BF16 keys and values. Finished seeds are
not run again. Writes ``benchmarks/results/accuracy_cpu.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp8rl.recipe import KVCache, Recipe
from fp8rl_demo.settings import DEMO_RECIPE

PRECISIONS = ("bf16", "fp8-rollout", "fp8")
BF16_KV = " + BF16 KV cache"
BF16_ATTENTION = " + BF16 K and V in training"
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("out/accuracy"))
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for name, precisions, suffix, kv_cache in (
            (f"seed-{seed}", PRECISIONS, "", KVCache()),
            (f"seed-{seed}-bf16-kv", PRECISIONS[1:], BF16_KV, KVCache(dtype="auto")),
            (f"seed-{seed}-bf16-attention", ("fp8",), BF16_ATTENTION, KVCache(in_training=False)),
        ):
            recipe = DEMO_RECIPE.model_copy(update={"kv_cache": kv_cache})
            rows += _run(args.out / name, precisions, seed, args.steps, suffix, recipe)
    run = json.loads((args.out / f"seed-{seeds[0]}" / "fp8" / "run.json").read_text())
    result = {
        "command": f"python benchmarks/accuracy.py --seeds {args.seeds} --steps {args.steps}",
        **{key: run[key] for key in ("versions", "recipe")},
        # What differs from run to run stands in each.
        "settings": {k: v for k, v in run["settings"].items() if k not in rows[0]},
        "runs": rows,
    }
    target = ROOT / "benchmarks" / "results" / "accuracy_cpu.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(_table(rows) + "\n")


def _run(
    folder: Path,
    precisions: tuple[str, ...],
    seed: int,
    steps: int,
    suffix: str,
    recipe: Recipe,
) -> list[dict[str, Any]]:
    if not all(_steps_done(folder / p) >= steps for p in precisions):
        command = ["-m", "fp8rl", "demo", "--compare", ",".join(precisions)]
        command += ["--seed", str(seed), "--steps", str(steps), "--out", str(folder)]
        command += ["--recipe", json.dumps(recipe.to_dict())]
        subprocess.run([sys.executable, *command], check=True)
    return [_summary(folder / p, p + suffix, seed) for p in precisions]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _steps_done(folder: Path) -> int:
    return len(_lines(folder / "metrics.jsonl"))


def _summary(folder: Path, precision: str, seed: int) -> dict[str, Any]:
    steps = _lines(folder / "metrics.jsonl")
    validation = _lines(folder / "validation.jsonl")
    tail = steps[-max(len(steps) // 4, 1) :]

    def mean(key: str) -> float:
        return statistics.fmean(step["mismatch"][key] for step in steps)

    return {
        "precision": precision,
        "seed": seed,
        "steps": len(steps),
        "accuracy_before": validation[0]["accuracy"],
        "accuracy_after": validation[-1]["accuracy"],
        "accuracy": [line["accuracy"] for line in validation],
        "reward_first_quarter": statistics.fmean(s["reward"] for s in steps[: len(tail)]),
        "reward_last_quarter": statistics.fmean(s["reward"] for s in tail),
        "kl_k3": mean("kl_k3"),
        "token_mult_prob_error": mean("token_mult_prob_error"),
        "ess": mean("ess"),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| precision | validation accuracy | reward, last quarter | KL (k3), nats/token |",
        "| --- | --- | --- | --- |",
    ]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        chosen = [row for row in rows if row["precision"] == precision]

        def cell(key: str, form: str, chosen: list = chosen) -> str:
            values = [row[key] for row in chosen]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            return f"{statistics.fmean(values):{form}} ± {spread:{form}}"

        lines.append(
            f"| {precision} | {cell('accuracy_after', '.3f')} "
            f"| {cell('reward_last_quarter', '.3f')} | {cell('kl_k3', '.2e')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
