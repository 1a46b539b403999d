"""Find the tiles of vLLM's Triton kernel for FP8 experts on this GPU, in vLLM's own file format.

    python benchmarks/tune_experts.py --shape benchmarks/shapes/moonlight_16b_a3b.json --out FOLDER
                                      [--ranks 1] [--jobs 12]

vLLM takes the tiles of its fused MoE kernel from a file named by the number of experts, their
width, the GPU and the quantization, in ``VLLM_TUNED_CONFIG_FOLDER`` or in its wheel, and guesses
where there is none. For each number of tokens this times the whole of the experts (routing by
chance, quantization, both products, SiLU) in a CUDA graph with the tiles that vLLM would take and
with each of :func:`candidates`. It writes the medians of the twelve quickest to
``FOLDER/times-NAME.json``, and few of them that are nearly as quick to ``FOLDER/NAME.json``
(few_tiles.py). All candidates add up blocks of 128 along K, as vLLM's
do, so that sums stay the same. vLLM's DeepGEMM kernel for experts is timed too, where it takes
them: fp8rl changes to it where experts have many rows (``vllm_fp8rl.kernels.fused_moe``).
``--ranks`` splits the width of the experts, as tensor parallel does. ``--jobs`` processes compile
the tiles first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"  # before vLLM: activation scales of the recipe

import torch
from facts import versions
from few_tiles import KEYS, choose, text
from profiles import graph_ms
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import fused_experts, override_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.fused_moe import (
    get_config_file_name,
    try_get_optimal_moe_config,
)
from vllm.v1.worker.workspace import init_workspace_manager

from fp8rl import Recipe
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import BLOCK, FP8_DTYPE

TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
MANY = 1024
"""From here on tiles of few rows are left out, before it those of 128."""
LAUNCHES, REPEATS = 4, 5
Tiles = dict[str, int]


def candidates() -> list[Tiles]:
    """Return the tiles to compare."""
    found = []
    for rows, columns, warps, stages, group in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4, 5), (1, 16)
    ):
        if warps == 8 and rows * columns < 64 * 128:
            continue
        if warps == 4 and rows * columns > 64 * 256:
            continue
        if (stages == 2 and rows < 64) or (stages == 5 and rows * columns > 64 * 128):
            continue
        values = (rows, columns, BLOCK[1], group, warps, stages)
        found.append(dict(zip(KEYS, values, strict=True)))
    return found


def fits(tiles: Tiles, tokens: int) -> bool:
    """Tell whether tiles are compared for so many tokens."""
    rows = tiles["BLOCK_SIZE_M"]
    return rows >= 64 if tokens >= MANY else rows < 128


class Experts:
    """The experts of one layer with random codes, on the GPU.

    Args:
        shape: the model's ``config.json``.
        ranks: GPUs over which the width is split.
    """

    def __init__(self, shape: Mapping[str, Any], ranks: int) -> None:
        spec = ModelSpec.of(shape)
        if not spec.experts:
            raise SystemExit("this model has no experts")
        self.count, self.chosen = spec.experts, spec.value("num_experts_per_tok", 1)
        numbers = spec.numbers
        self.hidden, self.width = numbers["hidden_size"], numbers["moe_intermediate_size"] // ranks
        self.name = get_config_file_name(self.count, self.width, "fp8_w8a8", list(BLOCK))

    def allocate(self) -> None:
        """Make the weights."""
        stacks = [(2 * self.width, self.hidden), (self.hidden, self.width)]
        self.weights = [self._codes(*each) for each in stacks]
        self.scales = [
            torch.full((self.count, -(-n // BLOCK[0]), -(-k // BLOCK[1])), 1e-3, device="cuda")
            for n, k in stacks
        ]
        self.config = fp8_w8a8_moe_quant_config(*self.scales, block_shape=list(BLOCK))

    def deep_gemm(self) -> Callable[[tuple[torch.Tensor, ...]], torch.Tensor]:
        """Return a call of vLLM's DeepGEMM kernel for experts, as an engine of fp8rl makes it."""
        from vllm_fp8rl.kernels.fused_moe import delegate_experts

        moe = FusedMoEConfig(
            num_experts=self.count,
            experts_per_token=self.chosen,
            hidden_dim=self.hidden,
            intermediate_size=self.width,
            num_local_experts=self.count,
            num_logical_experts=self.count,
            activation=MoEActivation.SILU,
            device="cuda",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            moe_backend="deep_gemm",
            max_num_tokens=max(TOKENS),
        )
        moe.intermediate_size_per_partition = self.width
        layer = SimpleNamespace(
            w13_weight_scale_inv=self.scales[0],
            w2_weight_scale_inv=self.scales[1],
            _expert_routing_tables=lambda: None,
        )
        init_workspace_manager(torch.device("cuda"))
        with set_current_vllm_config(VllmConfig()):  # vLLM reads settings of the engine there
            _, kernel = delegate_experts(layer, moe, Recipe())

        def run(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            hidden, weights, ids = inputs
            return kernel.apply(
                hidden_states=hidden,
                w1=self.weights[0],
                w2=self.weights[1],
                topk_weights=weights,
                topk_ids=ids,
                activation=MoEActivation.SILU,
                apply_router_weight_on_input=False,
                global_num_experts=self.count,
                expert_map=None,
                shared_experts=None,
                shared_experts_input=None,
            )

        return run

    def _codes(self, rows: int, columns: int) -> torch.Tensor:
        codes = torch.empty(self.count, rows, columns, dtype=FP8_DTYPE, device="cuda")
        for each in codes:
            each.copy_(torch.randn(rows, columns, device="cuda") * 50)
        return codes

    def default(self, tokens: int) -> Tiles:
        """Return the tiles that vLLM takes."""
        sizes = [tuple(each.shape) for each in self.weights]
        found = try_get_optimal_moe_config(*sizes, self.chosen, "fp8_w8a8", tokens, list(BLOCK))
        return {key: value for key, value in found.items() if key != "SPLIT_K"}

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states, weights of the chosen experts, and their numbers."""
        torch.manual_seed(tokens)
        hidden = torch.randn(tokens, self.hidden, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(tokens, self.count, device="cuda")
        weights, ids = scores.topk(self.chosen, dim=-1)
        return hidden, weights, ids.int()

    def run(self, inputs: tuple[torch.Tensor, ...], tiles: Tiles) -> torch.Tensor:
        """Compute the experts' output ``[tokens, hidden]`` in BF16."""
        with override_config(tiles):
            return fused_experts(
                inputs[0], *self.weights, inputs[1], inputs[2], quant_config=self.config
            )


def compile_some(experts: Experts, tiles: list[Tiles]) -> None:
    """Compile candidates in a process of its own, which leaves the files of Triton's cache."""
    experts.allocate()
    inputs = experts.inputs(256)
    for each in tiles:
        try:
            experts.run(inputs, each)
        except Exception as error:  # too much shared memory; `tune` leaves it out as well
            sys.stderr.write(f"{each}: {type(error).__name__}\n")
    torch.cuda.synchronize()


def tune(experts: Experts, tiles: list[Tiles]) -> Iterator[dict[str, Any]]:
    """Yield for each number of tokens the milliseconds by tiles, and how far results differ."""
    deep_gemm = None
    for tokens in TOKENS:
        inputs, default = experts.inputs(tokens), experts.default(tokens)
        expected = experts.run(inputs, default).float()

        def differs(found: torch.Tensor, expected: torch.Tensor = expected) -> float:
            return ((found.float() - expected).abs().max() / expected.abs().max()).item()

        def timed(chosen: Tiles, inputs: tuple[torch.Tensor, ...] = inputs) -> float:
            return graph_ms(lambda: experts.run(inputs, chosen), LAUNCHES, REPEATS)

        found: list[tuple[float, Tiles]] = []
        base = timed(default)
        for each in tiles:
            if not fits(each, tokens):
                continue
            try:
                found.append((timed(each), each))
            except Exception as error:
                sys.stderr.write(f"{tokens} tokens, {each}: {type(error).__name__}\n")
        best, quickest = min(found, key=lambda one: one[0])
        base = min(base, timed(default))
        told = {
            "tokens": tokens,
            "default_ms": base,
            "default": default,
            "best_ms": best,
            "difference": differs(experts.run(inputs, quickest)),
            "quickest": sorted(([round(ms, 5), *each.values()] for ms, each in found))[:12],
        }
        if tokens >= BLOCK[0]:
            deep_gemm = deep_gemm or experts.deep_gemm()
            told["deep_gemm_difference"] = differs(deep_gemm(inputs))
            told["deep_gemm_ms"] = graph_ms(partial(deep_gemm, inputs), LAUNCHES, REPEATS)
        yield told


def main() -> None:
    parser = argparse.ArgumentParser(description="Tiles of vLLM's kernel for FP8 experts")
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    experts = Experts(json.loads(options.shape.read_text(encoding="utf-8")), options.ranks)
    tiles = candidates()
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=compile_some, args=(experts, tiles[job :: options.jobs]))
        for job in range(options.jobs)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    experts.allocate()
    lines = []
    for found in tune(experts, tiles):
        lines.append(found)
        line = f"{found['tokens']:5} tokens: {found['default_ms']:.4f} ms, best "
        line += f"{found['best_ms']:.4f} {found['quickest'][0][1:]}"
        if "deep_gemm_ms" in found:
            line += f", DeepGEMM {found['deep_gemm_ms']:.4f}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        options.out.mkdir(parents=True, exist_ok=True)
        told = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "tokens": lines}
        (options.out / f"times-{experts.name}").write_text(json.dumps(told), encoding="utf-8")
    table = text(choose(lines), versions()["triton"])
    (options.out / experts.name).write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
