"""What a refit of a live 8B model costs on one GPU: time, where it goes, extra memory.

    python benchmarks/refit.py [--variants fp8rl,bf16,stock] [--repeats 15] [--out FILE.json]
    python benchmarks/refit.py --variants nccl,ipc [--ranks 2] [--codes]

The model has the shape of Qwen3-8B and dummy weights (``enforce_eager``); every tensor that the
sender holds lies on the GPU in BF16, each in memory of its own. Each variant runs in a process of
its own.

fp8rl: ``vllm_fp8rl.refit.refit`` and plain ``model.load_weights``, with batches of several sizes;
by kernel, what the GPU does in one of them. bf16: ``load_weights`` of an unquantized engine, which
only copies. stock: vLLM's own block FP8, which takes FP8 codes through ``reload_weights`` alone;
its tensors are first quantized by vLLM's ``per_block_cast_to_fp8``. nccl: vLLM's own trainer on a
GPU behind those of the engine's ranks, into the backend ``fp8rl_nccl``; ipc: on the engine's GPU,
into ``fp8rl_ipc``. The engine is then in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from processes import in_process, save
from profiles import by_function, by_kernel
from rollout import QWEN3_8B

from fp8rl_bench.facts import versions
from fp8rl_bench.variants import KV_SCALE, engine_arguments

VARIANTS = ("fp8rl", "bf16", "stock")
TRANSPORTS = ("nccl", "ipc")
MIB = 1 << 20


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


def trainer_tensors(shape: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every HF tensor of a Qwen3, on the current GPU."""
    import torch

    def draw(dims: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(dims, dtype=torch.bfloat16, device="cuda")
        return made.normal_(0, 0.02) if len(dims) > 1 else made.uniform_(0.5, 1.5)

    return [(name, draw(dims)) for name, dims in tensor_shapes(shape).items()]


def measure(load: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Milliseconds to the end of the GPU's work, and memory beside what there was before."""
    import torch

    load()  # the inventory, kernels
    load()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        load()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return {
        "ms_median": round(statistics.median(times), 2),
        "ms": [round(value, 2) for value in times],
        "peak_extra_mib": round((torch.cuda.max_memory_allocated() - held) / MIB, 2),
    }


def chunks(tensors: list[Any], limit: int) -> Iterator[list[Any]]:
    from vllm_fp8rl.refit import batches

    yield from batches(tensors, limit)


def run_fp8rl(llm: Any, model: Any, tensors: list[Any], repeats: int) -> dict[str, Any]:
    import torch

    from fp8rl.numerics import Quantized, all_finite, quantize_blocks
    from vllm_fp8rl.kv.scales import required_kv_scales
    from vllm_fp8rl.refit import BATCH_BYTES, refit
    from vllm_fp8rl.refit.transport import GPU_BATCH_FACTOR

    scales = [(n, torch.tensor(KV_SCALE, device="cuda")) for n in sorted(required_kv_scales(model))]
    stream, whole = tensors + scales, 1 << 40

    def listed() -> None:
        refit(llm, stream, expect_kv_scales=True)

    def by_refit(size: int) -> Callable[[], object]:
        return lambda: refit(llm, iter(stream), expect_kv_scales=True, batch_bytes=size)

    def plain(size: int) -> Callable[[], object]:
        return lambda: [model.load_weights(part) for part in chunks(stream, size)]

    def walk() -> None:
        model.load_weights(item for item in stream)  # vLLM walks with a generator

    default = BATCH_BYTES * GPU_BATCH_FACTOR
    bf16 = [tensor for _, tensor in tensors]
    jobs = []
    for name, tensor in tensors:
        if name.endswith("_proj.weight"):
            blocks = [-(-side // 128) for side in tensor.shape]
            codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device="cuda")
            jobs.append((tensor, Quantized(codes, torch.empty(blocks, device="cuda"))))
    return {
        "tensors": len(stream),
        "default_batch_mib": default // MIB,
        "refit of a list": measure(listed, repeats),
        "refit of an iterator": measure(by_refit(BATCH_BYTES), repeats),
        "refit, batches of 1 GiB": measure(by_refit((1 << 30) // GPU_BATCH_FACTOR), repeats),
        "load_weights, batches of 256 MiB": measure(plain(256 * MIB), repeats),
        "load_weights, batches of 1 GiB": measure(plain(1 << 30), repeats),
        "load_weights, one batch": measure(plain(whole), repeats),
        "load_weights of a generator": measure(walk, max(3, repeats // 3)),
        "check alone": measure(lambda: all_finite(bf16), repeats),
        "quantization alone": measure(lambda: quantize_blocks(jobs), repeats),
        "GPU ms, refit of a list": by_kernel(listed),
        "GPU ms, load_weights in one batch": by_kernel(plain(whole)),
        "host ms, refit of a list": by_function(listed),
    }


def run_bf16(llm: Any, model: Any, tensors: list[Any], repeats: int) -> dict[str, Any]:
    return {"load_weights, one batch": measure(lambda: model.load_weights(tensors), repeats)}


def run_stock(llm: Any, model: Any, tensors: list[Any], repeats: int) -> dict[str, Any]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    def quantized() -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors:
            if name.endswith("_proj.weight"):
                codes, scale_inv = per_block_cast_to_fp8(tensor, [128, 128], use_ue8m0=False)
                yield from ((name, codes), (f"{name}_scale_inv", scale_inv))
            else:
                yield name, tensor

    def reload() -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": quantized()})

    few = max(3, repeats // 3)
    return {
        "reload_weights, quantized meanwhile": measure(reload, few),
        "quantization alone": measure(lambda: [None for _ in quantized()], few),
    }


class Client:
    """What a trainer of vLLM's calls, given to an ``LLM``."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update()


def encode(tensors: list[Any]) -> None:
    """Put FP8 codes and scales in the place of the projections' weights."""
    from fp8rl.numerics import quantize_block

    for number, (name, tensor) in reversed(list(enumerate(tensors))):
        if name.endswith("_proj.weight"):
            codes, scales = quantize_block(tensor)
            tensors[number : number + 1] = (name, codes), (f"{name}_scale_inv", scales)


def run_transport(llm: Any, variant: str, options: Any, tensors: list[Any]) -> dict[str, Any]:
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.utils.network_utils import get_open_port

    info: Any = ipc_engine.IPCTrainerInitInfo(rank=0)
    if variant == "nccl":
        world = options.ranks + 1
        info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", get_open_port(), world, rank=0)
    model: Any = SimpleNamespace(named_parameters=lambda: iter(tensors))
    trainer = WeightTransferTrainerFactory.trainer_init(
        info, client=Client(llm), source=ModuleSource(model)
    )
    return {"send_weights": measure(trainer.send_weights, options.repeats)}


def run_variant(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine and its refits."""
    apart = variant in TRANSPORTS
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(apart))
    arguments = engine_arguments("fp8rl-kv" if apart or variant == "fp8rl" else variant)
    if apart:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for handles
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        arguments["weight_transfer_config"] = {"backend": f"fp8rl_{variant}"}
        arguments["tensor_parallel_size"] = options.ranks
    import torch
    from vllm import LLM

    shape = QWEN3_8B | options.shape
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape))
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        seed=0,
        **arguments,
    )
    torch.cuda.set_device(options.ranks if variant == "nccl" else 0)
    tensors = trainer_tensors(shape)
    if options.codes:
        encode(tensors)
    runs = {"fp8rl": run_fp8rl, "bf16": run_bf16, "stock": run_stock}
    with torch.no_grad():
        if apart:
            rows = run_transport(llm, variant, options, tensors)
        else:
            model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
            rows = runs[variant](llm, model, tensors, options.repeats)
    return {
        "variant": variant,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "received_bytes": sum(tensor.nbytes for _, tensor in tensors),
    } | rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of a refit on one GPU")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON; changes config.json")
    parser.add_argument("--ranks", type=int, default=1, help="of the engine, for nccl")
    parser.add_argument("--codes", action="store_true", help="send FP8 codes, for nccl and ipc")
    parser.add_argument("--out", type=Path, default=Path("refit.json"))
    parser.add_argument("--child", choices=VARIANTS + TRANSPORTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.child:
        options.out.write_text(json.dumps(run_variant(options.child, options)))
        return
    results = []
    for variant in options.variants.split(","):
        results.append(in_process(variant, VLLM_DEEP_GEMM_WARMUP="skip"))
        save(results, options.out, results[-1])


if __name__ == "__main__":
    main()
