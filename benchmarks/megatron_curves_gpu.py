"""Loss of each of six steps of ``megatron_step.py`` on a GPU: what makes recipes differ there.

    python benchmarks/megatron_curves_gpu.py [--steps 6] [--layers 28] [--out FILE]

A Qwen3-1.7B with random weights memorizes one micro-batch of random tokens: in BF16, in FP8, in FP8
with half of the layers pinned, and in the same BF16 model with the emulation of
``megatron_curves.py``, which shares no code with fp8rl.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from facts import versions
from megatron_common import QWEN3_1_7B, single_process
from megatron_curves import VARIANTS, emulate
from megatron_step import Trainer
from rich.console import Console

from fp8rl import PluginManager, Recipe
from fp8rl.recipe import Pins
from megatron_fp8rl import convert


def pins(mode: str, layers: int) -> Pins | None:
    half = layers // 2
    return {"first half pinned": Pins(first=half), "last half pinned": Pins(last=half)}.get(mode)


def losses(mode: str, shape: SimpleNamespace, options: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    trainer = Trainer(shape, options, "fp8rl" if mode == "fp8rl" else "BF16")
    if mode.startswith("emulated"):
        emulate(trainer.ddp.module.module, VARIANTS[mode])
    pinned = pins(mode, options.layers)
    if pinned is not None:
        convert(trainer.ddp, Recipe(pins=pinned), plugins=PluginManager(discover=False))
    return [trainer.step()["loss"] for _ in range(options.steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss curves on a GPU")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.micro_batches = 1
    shape = SimpleNamespace(**{**vars(QWEN3_1_7B), "num_hidden_layers": options.layers})
    modes = ("BF16", "fp8rl", "first half pinned", "last half pinned")
    console, curves = Console(), {}
    with single_process():
        for mode in (*modes, "emulated", "emulated, fprop alone"):
            curves[mode] = losses(mode, shape, options)
            console.print(mode, *(f"{loss:.3f}" for loss in curves[mode]))
            gc.collect()
            torch.cuda.empty_cache()
    if options.out:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "versions": versions(),
            "options": {k: v for k, v in vars(options).items() if k != "out"},
            "losses": curves,
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
