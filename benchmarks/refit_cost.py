"""What a refit of a live vLLM engine costs on this CPU: seconds and extra memory, by model size.

    python benchmarks/refit_cost.py [--sizes small,medium,large,experts] [--repeats 5] [--out FILE]

Each size runs in a fresh process with a real in-process engine (dummy checkpoint, FP8 linears, FP8
KV cache). The trainer's tensors are in memory beforehand, so extra memory is what the refit itself
needs: the peak of the resident set during ``vllm_fp8rl.refit.refit`` (``VmHWM``, reset just before
it) minus the resident set before it. glibc is told to return freed memory at once, so that neither
number hides behind its cache. Writes ``benchmarks/results/refit_cost_cpu.json``.

``experts`` has as many tensors as Qwen3-30B-A3B, each tiny, so that the work of Python for each of
them shows: seconds without those in which values were checked and quantized, which a GPU does in a
few launches.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facts import versions

RESULT = Path(__file__).resolve().parent / "results" / "refit_cost_cpu.json"
SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "medium": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    "large": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12},
    "experts": {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_experts": 128,
        "num_hidden_layers": 48,
    },
}
HEAD_SIZE = 128
VOCABULARY = 4096
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),  # and no longer adapted upwards
    "MALLOC_TRIM_THRESHOLD_": "0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="small,medium,large")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        sys.stdout.write(json.dumps(measure(args.measure, args.repeats)) + "\n")
        return
    rows = [_in_fresh_process(size, args.repeats) for size in args.sizes.split(",")]
    result = {
        "command": f"python benchmarks/refit_cost.py --sizes {args.sizes} --repeats {args.repeats}",
        "versions": versions(),
        "environment": ENVIRONMENT,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    _show(rows)


def measure(size: str, repeats: int) -> dict[str, Any]:
    """One row: refits of one engine, in this process."""
    import torch
    from vllm import LLM

    from fp8rl import Recipe
    from fp8rl.kv_scales import scale_names
    from vllm_fp8rl import engine_args
    from vllm_fp8rl.refit import refit

    shape = _config(size)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        llm = LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=16 << 20,
            skip_tokenizer_init=True,
            seed=0,
            **engine_args(Recipe()),
        )
    tensors = _trainer_tensors(shape)
    for name in scale_names(shape["num_hidden_layers"], ("k", "v")):
        tensors[name] = torch.tensor([0.05])
    refit(llm, tensors.items(), expect_kv_scales=True)  # imports, hooks
    _generate(llm)  # the float32 copies of the CPU kernel exist, as between two training steps
    seconds, extra, python = [], [], []
    numerics = _time_numerics()
    for _ in range(repeats):
        before = _settled()
        numerics.clear()
        report = refit(llm, tensors.items(), expect_kv_scales=True)
        extra.append(_status("VmHWM") - before)
        seconds.append(report.seconds)
        python.append(report.seconds - sum(numerics))
        _generate(llm)
    layer = sum(t.nbytes for n, t in tensors.items() if n.startswith("model.layers.0."))
    return {
        "size": size,
        "shape": {key: shape[key] for key in SIZES[size]},
        "parameters": sum(t.numel() for t in tensors.values()),
        "tensors": len(tensors),
        "received_bytes": report.received_bytes,
        "layer_bf16_bytes": layer,
        "largest_tensor_bytes": max(t.nbytes for t in tensors.values()),
        "seconds_median": statistics.median(seconds),
        "seconds": seconds,
        "python_us_per_tensor_median": statistics.median(python) / len(tensors) * 1e6,
        "python_seconds": python,
        "extra_bytes_peak": max(extra),
        "extra_bytes": extra,
        "extra_in_layers": max(extra) / layer,
    }


def _config(size: str) -> dict[str, Any]:
    shape = SIZES[size]
    heads = max(2, shape["hidden_size"] // HEAD_SIZE)
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
        **(experts if "num_experts" in shape else {}),
        **shape,
    }


def tensor_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every HF tensor of a Qwen3 with such a ``config.json``, in the order of a checkpoint.

    All layers of a MoE have experts.
    """
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = (shape[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    mlp = _mlp("mlp", hidden, inner)
    if "num_experts" in shape:
        mlp = {"mlp.gate": (shape["num_experts"], hidden)}
        for expert in range(shape["num_experts"]):
            mlp |= _mlp(f"mlp.experts.{expert}", hidden, shape["moe_intermediate_size"])
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        **mlp,
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (shape["vocab_size"], hidden)}
    for index in range(shape["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": dims for name, dims in layer.items()}
    shapes["model.norm"] = (hidden,)
    if not shape["tie_word_embeddings"]:
        shapes["lm_head"] = (shape["vocab_size"], hidden)
    return {f"{name}.weight": dims for name, dims in shapes.items()}


def _mlp(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


def _time_numerics() -> list[float]:
    """Return a list that takes the seconds in which a refit checks or quantizes values."""
    from vllm_fp8rl.refit import session
    from vllm_fp8rl.storage import block_grid

    spent: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*args)
            finally:
                spent.append(time.perf_counter() - began)

        return measured

    start = session.start_finite_check
    session.start_finite_check = lambda *args: timed(start(*args))  # it reads when it is asked
    block_grid.quantize_blocks = timed(block_grid.quantize_blocks)
    return spent


def _trainer_tensors(shape: dict[str, Any]) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(dims: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(dims, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    return {name: draw(dims) for name, dims in tensor_shapes(shape).items()}


def _generate(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)


def _settled() -> int:
    """Resident bytes with nothing left to give back, and the peak reset to them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    resident = _status("VmRSS")
    if abs(_status("VmHWM") - resident) > 1 << 20:
        raise RuntimeError("This kernel does not reset VmHWM through /proc/self/clear_refs.")
    return resident


def _status(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


def _in_fresh_process(size: str, repeats: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", size, "--repeats", str(repeats)],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Cost of a refit on CPU, one thread")
    heads = ("model", "parameters", "seconds", "GB/s", "extra MB", "one layer MB", "layers")
    for head in (*heads, "tensors", "Python µs"):
        table.add_column(head, justify="left" if head == "model" else "right")
    for row in rows:
        rate = row["received_bytes"] / row["seconds_median"] / 1e9
        cells = (
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['seconds_median']:.3f}",
            f"{rate:.2f}",
            f"{row['extra_bytes_peak'] / 1e6:.1f}",
            f"{row['layer_bf16_bytes'] / 1e6:.1f}",
            f"{row['extra_in_layers']:.2f}",
            f"{row['tensors']:,}",
            f"{row['python_us_per_tensor_median']:.1f}",
        )
        table.add_row(row["size"], *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
