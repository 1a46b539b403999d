"""Draw the curves of several seeds' runs of ``nemo_rl.py`` as one SVG.

    python benchmarks/curves.py benchmarks/results/reasoning_h200.json docs/assets/accuracy.svg
    python benchmarks/curves.py benchmarks/results/reasoning_sums_h200.json \\
        docs/assets/accuracy_sums.svg

Of each variant in the file it draws the mean of its seeds' reward, each a running mean of 15 steps,
as far as all of its seeds go; a band spans them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

WINDOW = 15
LOOK = {
    "bf16": ("BF16", "black"),
    "fp8rl-exact-int8kv": ("FP8, INT8 cache, exact", "tab:green"),
    "fp8rl-bf16kv": ("FP8, BF16 cache", "tab:blue"),
    "fp8rl-rollout": ("FP8 in rollouts alone", "tab:purple"),
    "fp8rl": ("FP8, FP8 cache", "tab:red"),
}
"""Variants that are drawn: far enough apart to be told from each other."""


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    seeds = defaultdict(list)
    for name, run in json.loads(source.read_text(encoding="utf-8"))["runs"].items():
        means = np.convolve(run["curves"]["train/reward"], np.full(WINDOW, 1 / WINDOW), "valid")
        seeds[name.split(":")[0]].append(means)
    # Equal data make an equal file, whose words are text and not outlines.
    plt.rcParams |= {"svg.hashsalt": "fp8rl", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for variant in filter(seeds.__contains__, LOOK):
        label, color = LOOK[variant]
        shortest = min(map(len, seeds[variant]))
        runs = np.stack([means[:shortest] for means in seeds[variant]])
        steps = range(WINDOW, WINDOW + shortest)
        axes.plot(steps, runs.mean(0), color=color, label=f"{label} (seeds: {len(runs)})")
        axes.fill_between(steps, runs.min(0), runs.max(0), color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="reward, running mean")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
