"""What test_parallel.py compares: one small FP8 training run on any topology.

Run as a script (see ``launch``) it goes through the two-process topologies in one pair of
processes, and each rank writes what it saw to ``OUT/<rank>.pt``. test_parallel.py runs
:func:`train` in its own process for the truth.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3MoeConfig

from fp8rl import Recipe
from fp8rl.errors import CheckpointError, ScaleError
from fp8rl.gemm import ReferenceBackend
from fp8rl.numerics import quantize_block
from megatron_fp8rl import compat, convert, weight_codes_hf
from megatron_fp8rl.backends import BackendChoice
from megatron_fp8rl.export import export_hf, load_hf
from megatron_fp8rl.layout import plain_layout
from megatron_fp8rl.linear import Call, Fp8State, fp8_linear
from megatron_fp8rl.observers import QKVObserver
from megatron_fp8rl.testing.cpu_shim import CpuShim
from megatron_fp8rl.testing.launch import join
from megatron_fp8rl.testing.models import build_gpt
from megatron_fp8rl.weight_codes import WeightCodes, WeightEpoch

STEPS, MICROBATCHES, BATCH, LENGTH, VOCAB, LAYERS = 3, 2, 2, 32, 94, 4
PADDED_VOCAB = 96
# Layer 1 wholly and one module of layer 3: a stage-local layer number would mix them up, since
# with two stages both are local layer 1, and with four chunks all are local layer 0.
PINS = {"layers": [1], "names": ["model.layers.3.mlp.down_proj"]}


# A mixture behind a dense layer; pinned is all of layer 1 and the experts of layer 3.
MOE_PINS = {"layers": [1], "names": ["model.layers.3.mlp.experts.*"]}
EXPERTS = 4


@dataclass(frozen=True)
class Topology:
    moe: bool = False
    ep: int = 1
    expert_tp: int | None = None
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dist_opt: bool = False
    overlap: bool = False
    """Gather parameters in the next forward, as late as megatron can."""
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def pins(self) -> dict[str, list]:
        return MOE_PINS if self.moe else PINS


SINGLE = Topology()
TOPOLOGIES = {
    "tp2": Topology(tp=2),
    "tp2-sp": Topology(tp=2, sequence_parallel=True, dist_opt=True),
    "pp2": Topology(pp=2),
    "vpp2": Topology(pp=2, vpp=2),
    "dp2": Topology(dist_opt=True),
    "dp2-overlap": Topology(dist_opt=True, overlap=True),
    "tp2-bf16": Topology(tp=2, dtype=torch.bfloat16),
    "pp2-bf16": Topology(pp=2, dtype=torch.bfloat16, dist_opt=True),
    "moe-ep2": Topology(moe=True, ep=2, dist_opt=True),
    "moe-pp2": Topology(moe=True, pp=2),
    "moe-tp2": Topology(moe=True, tp=2, expert_tp=2, sequence_parallel=True),
    "moe-tp2-ep2": Topology(moe=True, tp=2, ep=2, expert_tp=1, sequence_parallel=True),
}


def hf_config(tied: bool = True, moe: bool = False) -> Qwen3Config | Qwen3MoeConfig:
    """Every shard's rows and columns are multiples of 128 at TP=2, so codes must not change."""
    experts = {
        "moe_intermediate_size": 256,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    return (Qwen3MoeConfig if moe else Qwen3Config)(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.05,
        **(experts if moe else {}),
    )


def build(topology: Topology, weights: dict[str, torch.Tensor], tied: bool = True) -> list:
    """This rank's chunks, each wrapped for BF16 and DDP, with the given weights."""
    config = hf_config(tied, topology.moe)
    config.vocab_size = PADDED_VOCAB
    overrides: dict[str, Any] = {
        "sequence_parallel": topology.sequence_parallel,
        "expert_tensor_parallel_size": topology.expert_tp,
    }
    stages: list[int | None] = [None]
    if topology.vpp:
        overrides["virtual_pipeline_model_parallel_size"] = topology.vpp
        stages = list(range(topology.vpp))
    chunks = []
    for index, vp_stage in enumerate(stages):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and index == 0
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        gpt = build_gpt(
            config,
            dtype=topology.dtype,
            pre_process=first,
            post_process=last and index == len(stages) - 1,
            vp_stage=vp_stage,
            **overrides,
        )
        chunks.append(Float16Module(gpt.config, gpt) if gpt.config.bf16 else gpt)
    load_hf(chunks, weights, vocab_size=VOCAB, allow_cast=True)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=topology.dist_opt,
        overlap_grad_reduce=topology.overlap,
        overlap_param_gather=topology.overlap,
    )
    return [
        DistributedDataParallel(
            config=chunk.config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]


def batches(step: int) -> list[torch.Tensor]:
    """Micro-batches of one step for this data-parallel rank; the step's data are the same on any
    topology. Token t+1 mostly follows from token t, so the loss can fall."""
    generator = torch.Generator().manual_seed(100 + step)
    noise = torch.randint(0, 3, (MICROBATCHES * BATCH, LENGTH + 1), generator=generator)
    ids = noise.cumsum(1) % VOCAB
    rank = parallel_state.get_data_parallel_rank()
    share = len(ids) // parallel_state.get_data_parallel_world_size()
    mine = ids[rank * share : (rank + 1) * share]
    return list(mine.split(BATCH))


def _forward_step(iterator, model):
    ids = next(iterator)
    positions = torch.arange(LENGTH).expand(len(ids), -1)
    losses = model(ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous())

    def mean(output):
        loss = output.float().mean()
        # A copy: the schedule divides what is returned by the number of micro-batches, in place.
        return loss, {"loss": loss.detach().clone()}

    return losses, mean


def train(topology: Topology, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A few FP8 optimizer steps; what this rank saw of them."""
    model_parallel_cuda_manual_seed(1)
    model = build(topology, weights)
    # Kept codes are the harder case where parameters are gathered late.
    keep = True if topology.overlap else None
    conversion = convert(model, Recipe.from_dict({"pins": topology.pins}), keep_codes=keep)
    observer = QKVObserver(model, enabled=False)
    percentiles = QKVObserver(model, enabled=False, percentile=90.0)
    config = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if topology.overlap:
        config.no_sync_func = model[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=2e-3,
            adam_eps=1e-4,  # at 1e-8 a gradient of pure rounding noise moves its weight
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=config.bf16,
            params_dtype=topology.dtype,
            use_distributed_optimizer=topology.dist_opt,
            overlap_param_gather=topology.overlap,
        ),
        model,
    )
    result: dict[str, Any] = {
        "exported": dict(export_hf(model, vocab_size=VOCAB)),
        "modules": sorted(conversion.modules),
        "losses": [],
    }
    for step in range(STEPS):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        data = batches(step)
        with observer.observing(step == 0), percentiles.observing(step == 0):
            seen = get_forward_backward_func()(
                forward_step_func=_forward_step,
                # Interleaving wants an iterator for each chunk.
                data_iterator=[iter(data) for _ in model] if topology.vpp else iter(data),
                model=model if topology.vpp else model[0],
                num_microbatches=len(data),
                seq_length=LENGTH,
                micro_batch_size=len(data[0]),
                forward_only=False,
            )
        if step == 0:
            result["scales"] = observer.scales(margin=1.0)
            result["percentiles"] = percentiles.scales(margin=1.0)
        if seen:
            result["losses"].append(_mean_loss(seen))
        ok, _, _ = optimizer.step()
        assert ok
        if topology.overlap:  # a look at weights of which each rank has its own share alone
            for module in conversion.modules.values():
                weight_codes_hf(module)
        result["trained"] = dict(export_hf(model, vocab_size=VOCAB))  # a refit after every step
    result["codes"] = {"fp32": _code_mismatches(conversion, result["trained"], "fp32")}
    conversion.close()
    again = convert(
        model, Recipe.from_dict({"pins": topology.pins, "weights": {"scale_format": "pow2"}})
    )
    result["codes"]["pow2"] = _code_mismatches(again, result["trained"], "pow2")
    result["nan"] = _nan_on_the_last_rank(observer)
    return result


def _mean_loss(seen: list[dict[str, torch.Tensor]]) -> float:
    loss = torch.stack([item["loss"] for item in seen]).mean()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return loss.item() / parallel_state.get_data_parallel_world_size()


def _code_mismatches(conversion, exported, scale_format) -> dict[str, tuple[int, int]]:
    """Per HF module of this rank: codes and scales compared, and how many differ from quantizing
    the whole exported matrix, as a rollout engine on one rank does."""
    dense = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_tensor_parallel_group()
    counts = {}
    for module in conversion.modules.values():
        for name, held in weight_codes_hf(module).items():
            group = experts if ".experts." in name else dense
            size, rank = group.size(), group.rank()
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            whole = quantize_block(exported[f"{name}.weight"], scale_format=scale_format)
            codes = whole.codes.view(torch.uint8).chunk(size, dim)[rank]
            scales = whole.scale_inv.chunk(size, dim)[rank]
            assert codes.shape == held.codes.shape and scales.shape == held.scale_inv.shape
            wrong = (codes != held.codes.view(torch.uint8)).sum() + (scales != held.scale_inv).sum()
            counts[name] = (codes.numel() + scales.numel(), int(wrong))
    return counts


def _nan_on_the_last_rank(observer: QKVObserver) -> str:
    """What this rank is told when one rank alone saw a NaN."""
    world = torch.distributed.get_world_size()
    table = torch.ones(LAYERS, 3)
    if torch.distributed.get_rank() == world - 1:
        table[2, 1] = torch.nan
    observer.load_state_dict({"amax": table})
    try:
        observer.scales(margin=1.0)
    except ScaleError as error:
        return str(error)
    return "no error"


def sequence_parallel_bits() -> dict[str, Any]:
    """One column-parallel layer: gathering codes against gathering the activations first."""
    group = parallel_state.get_tensor_model_parallel_group()
    layer = ColumnParallelLinear(
        200,
        256,
        config=build_gpt(hf_config(), dtype=torch.float32).config,
        init_method=torch.nn.init.xavier_normal_,
        bias=False,
    )
    codes = WeightCodes(plain_layout("o_proj", 128), "fp32", WeightEpoch())
    backends = BackendChoice({"reference": ReferenceBackend()}, ["fp32"])
    state = Fp8State("model.layers.0.self_attn.o_proj", codes, backends, "fp32")
    generator = torch.Generator().manual_seed(9)
    whole = torch.randn(12, 3, 200, generator=generator)
    grad = torch.randn(12, 3, 256, generator=generator).chunk(2, -1)[group.rank()]
    found, sent = [], []
    for gathered_first in (True, False):
        layer.weight.grad = None
        x = whole if gathered_first else whole.chunk(2)[group.rank()]
        x = x.clone().requires_grad_()
        call = Call(
            state=state,
            fusion=False,
            training=True,
            sequence_parallel=not gathered_first,
            allreduce_dgrad=gathered_first,
            tp_group=group,
        )
        with _counting(sent):
            y = fp8_linear(x, layer.weight, None, call)
        y.backward(grad)
        dx = x.grad.chunk(2)[group.rank()] if gathered_first else x.grad
        found.append((y.detach(), dx, layer.weight.grad))
    same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    return {"same": same, "sent": sent, "tokens": len(whole) * 3 // 2}


@contextmanager
def _counting(sent: list[tuple[str, int]]) -> Iterator[None]:
    """Note the dtype and the bytes of each all-gather's input."""
    original = compat.all_gather

    def count(output, shard, group, *, wait=True):
        sent.append((str(shard.dtype), shard.numel() * shard.element_size()))
        return original(output, shard, group, wait=wait)

    compat.all_gather = count
    try:
        yield
    finally:
        compat.all_gather = original


def round_trip_untied(topology: Topology, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Load and export with an output layer of its own, and a load that must fail everywhere."""
    untied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].flip(0)}
    model = build(topology, untied, tied=False)
    message = "no error"
    try:
        load_hf(
            model, {n: t for n, t in untied.items() if n != "model.layers.3.mlp.up_proj.weight"}
        )
    except CheckpointError as error:
        message = str(error)
    return {"untied": dict(export_hf(model, vocab_size=VOCAB)), "untied_error": message}


def main(out: Path, names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    weights = {kind: load_file(out / f"{kind}.safetensors") for kind in ("dense", "moe")}
    with CpuShim().active():
        rank, _ = join()
        results = {}
        for name in names:
            sys.stderr.write(f"{name}\n")  # a hang is told with the last line
            sys.stderr.flush()
            topology = TOPOLOGIES[name]
            parallel_state.initialize_model_parallel(
                topology.tp,
                topology.pp,
                virtual_pipeline_model_parallel_size=topology.vpp,
                expert_model_parallel_size=topology.ep,
                expert_tensor_parallel_size=topology.expert_tp,
            )
            results[name] = train(topology, weights["moe" if topology.moe else "dense"])
            if name == "tp2-sp":
                results[name]["bits"] = sequence_parallel_bits()
            if name in ("tp2", "vpp2"):
                results[name] |= round_trip_untied(topology, weights["dense"])
            parallel_state.destroy_model_parallel()
        torch.save(results, out / f"{rank}.pt")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
