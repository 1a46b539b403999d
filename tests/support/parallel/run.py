"""One small training run on any topology and device, in FP8 or without."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
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
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from transformers import Qwen3Config, Qwen3MoeConfig

from fp8rl import Recipe
from megatron_fp8rl import Conversion, convert
from megatron_fp8rl.export import load_hf
from megatron_fp8rl.testing.models import build_gpt

STEPS, MICROBATCHES, BATCH, LENGTH, VOCAB, LAYERS = 3, 2, 2, 32, 94, 4
PADDED_VOCAB = 96
LAST_STAGES = "model.layers.3.self_attn.o_proj.weight"
"""A tensor that the last pipeline stage alone has."""
CPU = torch.device("cpu")
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
    gemm_backend: str | None = None
    """What multiplies; by default the only one of a CPU."""

    @property
    def kind(self) -> str:
        return "moe" if self.moe else "dense"

    @property
    def has_int8(self) -> bool:
        """Whether a pass over an INT8 cache is made too: to save time, in these alone."""
        return not self.moe and self.dtype == torch.float32

    @property
    def pins(self) -> dict[str, list]:
        return MOE_PINS if self.moe else PINS


SINGLE = Topology()
# What one process does on one device: the truth for every topology of its kind and dtype.
SINGLES = {
    "single": SINGLE,
    "single-bf16": Topology(dtype=torch.bfloat16),
    "single-moe": Topology(moe=True),
}
TOPOLOGIES = {
    "tp2": Topology(tp=2),
    "tp2-sp": Topology(tp=2, sequence_parallel=True, dist_opt=True),
    "vpp2": Topology(pp=2, vpp=2),
    "dp2-bf16": Topology(dist_opt=True, dtype=torch.bfloat16),
    "dp2-overlap": Topology(dist_opt=True, overlap=True),
    "tp2-bf16": Topology(tp=2, sequence_parallel=True, dtype=torch.bfloat16),
    "moe-ep2": Topology(moe=True, ep=2, dist_opt=True),
    "moe-tp2": Topology(moe=True, tp=2, expert_tp=2, sequence_parallel=True),
}


def hf_config(moe: bool = False) -> Qwen3Config | Qwen3MoeConfig:
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
        tie_word_embeddings=True,
        initializer_range=0.05,
        **(experts if moe else {}),
    )


def random_weights(moe: bool) -> dict[str, torch.Tensor]:
    """Float32 weights by Hugging Face name, spread as megatron initialises them."""
    config = hf_config(moe=moe)
    generator = torch.Generator().manual_seed(5)
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB, hidden), "norm": (hidden,)}
    for layer in range(LAYERS):
        inside: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (config.head_dim,),
            "self_attn.k_norm": (config.head_dim,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, heads),
        }
        blocks, width = ["mlp"], config.intermediate_size
        if moe and layer not in config.mlp_only_layers:
            inside["mlp.gate"] = (EXPERTS, hidden)
            blocks = [f"mlp.experts.{number}" for number in range(EXPERTS)]
            width = config.moe_intermediate_size
        for block in blocks:
            inside[f"{block}.gate_proj"] = inside[f"{block}.up_proj"] = (width, hidden)
            inside[f"{block}.down_proj"] = (hidden, width)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in inside.items()}

    def fill(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        into_residual = name.endswith(("o_proj", "down_proj"))
        std = config.initializer_range / ((2 * LAYERS) ** 0.5 if into_residual else 1.0)
        return torch.randn(shape, generator=generator) * std

    return {f"model.{name}.weight": fill(name, shape) for name, shape in shapes.items()}


def build(
    topology: Topology,
    weights: dict[str, torch.Tensor],
    device: torch.device = CPU,
) -> list:
    """This rank's chunks, each wrapped for BF16 and DDP, with the given weights."""
    config = hf_config(topology.moe)
    config.vocab_size = PADDED_VOCAB
    overrides: dict[str, Any] = {
        "sequence_parallel": topology.sequence_parallel,
        "expert_tensor_parallel_size": topology.expert_tp,
        "deterministic_mode": True,
        # SwiGLU is one with its quantization then, in BF16.
        "bias_activation_fusion": topology.dtype == torch.bfloat16,
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
        ).to(device)
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


def batches(step: int, device: torch.device = CPU) -> list[torch.Tensor]:
    """One step's micro-batches of this rank; token t+1 mostly follows t, so the loss can fall."""
    generator = torch.Generator().manual_seed(100 + step)
    noise = torch.randint(0, 3, (MICROBATCHES * BATCH, LENGTH + 1), generator=generator)
    ids = (noise.cumsum(1) % VOCAB).to(device)
    rank = parallel_state.get_data_parallel_rank()
    share = len(ids) // parallel_state.get_data_parallel_world_size()
    mine = ids[rank * share : (rank + 1) * share]
    return list(mine.split(BATCH))


def _forward_step(iterator, model):
    ids = next(iterator)
    positions = torch.arange(LENGTH, device=ids.device).expand(len(ids), -1)
    losses = model(ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous())

    def mean(output):
        loss = output.float().mean()
        # A copy: the schedule divides what is returned by the number of micro-batches, in place.
        return loss, {"loss": loss.detach().clone()}

    return losses, mean


class Run:
    """Model, optimizer and, with ``fp8``, conversion of one rank."""

    def __init__(
        self,
        topology: Topology,
        weights: dict[str, torch.Tensor],
        device: torch.device = CPU,
        *,
        fp8: bool = True,
    ) -> None:
        model_parallel_cuda_manual_seed(1)
        self.topology, self.device = topology, device
        self.model = build(topology, weights, device=device)
        self.conversion = self.convert() if fp8 else None
        self.keeping = ExitStack()
        if self.conversion is not None and topology.overlap:
            # Kept codes are the harder case where parameters are gathered late.
            self.keeping.enter_context(self.conversion.keeping_codes())
        config = self.model[0].config
        config.finalize_model_grads_func = finalize_model_grads
        if topology.overlap:
            config.no_sync_func = self.model[0].no_sync
        self.optimizer = get_megatron_optimizer(
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
            self.model,
        )

    def convert(self, **recipe: Any) -> Conversion:
        return convert(
            self.model,
            Recipe.from_dict({"pins": self.topology.pins, **recipe}),
            gemm_backend=self.topology.gemm_backend,
        )

    def forward_backward(self, step: int) -> float | None:
        """Gradients of one step; the loss of the whole batch, where the last stage is."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = batches(step, self.device)
        interleaved = self.topology.vpp is not None
        seen = get_forward_backward_func()(
            forward_step_func=_forward_step,
            # Interleaving wants an iterator for each chunk.
            data_iterator=[iter(data) for _ in self.model] if interleaved else iter(data),
            model=self.model if interleaved else self.model[0],
            num_microbatches=len(data),
            seq_length=LENGTH,
            micro_batch_size=len(data[0]),
            forward_only=False,
        )
        return _mean_loss(seen) if seen else None

    def update(self) -> float:
        """The optimizer step; returns the gradient norm."""
        ok, norm, _ = self.optimizer.step()
        assert ok
        return float(norm)


def _mean_loss(seen: list[dict[str, torch.Tensor]]) -> float:
    loss = torch.stack([item["loss"] for item in seen]).mean()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return loss.item() / parallel_state.get_data_parallel_world_size()
