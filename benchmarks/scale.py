"""What a refit costs at sizes that were not run, on paper: ``python benchmarks/scale.py``.

Prints the table of docs/scale.md, which says what is assumed. Bytes follow from the models'
configs; what a rank does with them costs what it cost with Qwen3-30B-A3B on an H200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.models.pins import PinPolicy
from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins

HERE = Path(__file__).parent
NIC = 0.8 * 400e9 / 8
"""Bytes a second of the one 400 Gbit/s adapter that a GPU of such a cluster has."""
NVLINK = 0.8 * 450e9
GB = 1e9


def shape(name: str) -> dict[str, Any]:
    """The config of a file in ``shapes/``."""
    return json.loads((HERE / "shapes" / f"{name}.json").read_text(encoding="utf-8"))


QWEN3_235B = shape("qwen3_30b_a3b") | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
KIMI_K2 = shape("moonlight_16b_a3b") | {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
}


class Model:
    """Bytes of a whole model, and what one rank's refit of them takes."""

    def __init__(self, config: dict[str, Any]) -> None:
        spec = ModelSpec.of(config)
        sizes, rows = Sizes(spec, 1), PinPolicy(Pins(), spec.names).report()
        held = sizes.bytes(rows, 2, "auto")
        self.tensors = len(rows) + sum(len(layer.parameters) for layer in spec.layers)
        self.bf16 = 2 * sizes.elements(rows)
        self.fp8 = held.weights
        self.quantized = 2 * held.codes
        """Bytes, in BF16, of what becomes codes."""

    def seconds(self, cost: Cost, ranks: int = 1) -> tuple[float, float]:
        """Seconds of the GPU, for a rank that checks all and quantizes its share; of the host."""
        gpu = self.bf16 * cost.check + self.quantized / ranks * cost.quantize
        return gpu, self.tensors * cost.host


@dataclass(frozen=True)
class Cost:
    """Seconds for a byte that is checked, a byte that is quantized, and a tensor."""

    check: float
    quantize: float
    host: float

    @classmethod
    def measured(cls) -> Cost:
        """Read it from the refit of Qwen3-30B-A3B."""
        (row, *_), model = results("rollout_30b_h200"), Model(shape("qwen3_30b_a3b"))
        gpu = row["refit_gpu_ms"]
        beside = row["refit_seconds_median"] - sum(gpu.values()) / 1e3
        return cls(
            gpu["finite"] / 1e3 / model.bf16,
            gpu["multi_tensor"] / 1e3 / model.quantized,
            beside / model.tensors,
        )


def results(name: str) -> list[dict[str, Any]]:
    """The rows of a file in ``results/`` in which a refit was timed."""
    found = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return [row for row in found["results"] if "refit_gpu_ms" in row]


LAYOUTS = (
    ("Qwen3-30B-A3B, one host", shape("qwen3_30b_a3b"), 2, 1, 2, NVLINK),
    ("Qwen3-235B-A22B", QWEN3_235B, 128, 16, 8, NIC),
    ("Kimi-K2, 1T", KIMI_K2, 256, 16, 16, NIC),
)
"""Name, config, GPUs of the trainer, engines, GPUs of an engine, bytes a second of a GPU's link."""


def table() -> Iterator[list[str]]:
    """Rows of cells."""
    cost = Cost.measured()
    for name, config, trainers, engines, ranks, link in LAYOUTS:
        model = Model(config)
        gpu, host = model.seconds(cost, ranks)
        into, out = model.fp8 / ranks, model.fp8 * engines / trainers
        yield [
            name,
            f"{trainers} + {engines} x {ranks}",
            *(f"{count / GB:,.0f}" for count in (model.bf16, model.fp8, into)),
            *(f"{bytes_ / link:.2g}" for bytes_ in (model.bf16, model.fp8, max(into, out))),
            *(f"{seconds:.2g}" for seconds in (gpu, host)),
        ]


def main() -> None:
    for cells in table():
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
