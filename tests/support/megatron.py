"""Small Megatron models in one process, their losses, and conversions without installed plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from fp8rl import PluginManager, Recipe
from fp8rl.gemm import BackendChoice, ReferenceBackend
from fp8rl.numerics import BLOCK, Quantized
from fp8rl.recipe import Pins
from fp8rl.training import weight_codes
from fp8rl.training.layout import RowLayout
from fp8rl.training.linear import Fp8State
from fp8rl.training.weight_codes import WeightCodes, WeightEpoch
from megatron_fp8rl import Conversion, convert
from megatron_fp8rl.export import load_hf
from megatron_fp8rl.layers.linear_modules import weights_of
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo
from megatron_fp8rl.testing.models import build_gpt

SEED = 1234
VOCAB, LENGTH = 64, 32
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


def dense(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**(SMALL | changes))


def moe(experts: int, **changes: Any) -> Qwen3MoeConfig:
    """A model of which each token visits two experts of width 128."""
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return Qwen3MoeConfig(**(SMALL | sizes | {"norm_topk_prob": True} | changes))


def convert_alone(model: Any, recipe: Recipe | None = None, **options: Any) -> Conversion:
    """Convert without the plugins that are installed here."""
    return convert(model, recipe or Recipe(), plugins=PluginManager(discover=False), **options)


def weight_codes_hf(module: Any) -> dict[str, Quantized]:
    """Quantize a converted module's weights as the rollout engine does.

    Returns:
        By global HF module name, this rank's rows (or columns) of each HF tensor on its own grid:
        ``quantize_block`` of the exported shard gives the same. Where a fused module's parts do
        not start on block boundaries, one entry under the fused name (``..qkv_proj``): the grid of
        the rank's ``[q; k; v]`` or ``[gate; up]``.
    """
    found: dict[str, Quantized] = {}
    state, layout = module.fp8_state, module.fp8_state.codes.layout
    for name, weight in zip(state.experts or (state.name,), weights_of(module), strict=True):
        codes = state.codes.fresh(weight)
        if layout.in_place:  # of either order: on HF's grid
            widths = tuple(n // BLOCK[0] for n in layout.widths)
            blocks = replace(layout, widths=widths, apart=False)
            # E4M3 has no cat kernel everywhere; bytes have.
            rows = layout.to_hf(codes.codes.view(torch.uint8)).view(codes.codes.dtype)
            codes = Quantized(rows, blocks.to_hf(codes.scale_inv))
        found |= layout.by_name(name, codes)
    return found


def pinned(**pins: Any) -> Recipe:
    return Recipe(pins=Pins(**pins))


def tokens(seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Random token numbers, one more than a model sees: the last is a label."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, LENGTH + 1), generator=generator)


def hf_gpt(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    allow_cast: bool = False,
    build: Callable[..., Any] = build_gpt,
    **overrides: Any,
) -> Any:
    """A model in evaluation with the shape and the weights of a checkpoint."""
    model = build(AutoConfig.from_pretrained(path), dtype=dtype, **overrides).eval()
    load_hf(model, load_file(path / "model.safetensors"), allow_cast=allow_cast)
    return model


def prompts() -> list[list[int]]:
    return torch.randint(2, 512, (24, 16), generator=torch.Generator().manual_seed(5)).tolist()


def logprobs(model: torch.nn.Module, ids: list[list[int]]) -> torch.Tensor:
    """The log-probability of each token but the first of its row, rows one after another."""
    tokens = torch.tensor(ids)
    positions = torch.arange(tokens.shape[1]).expand(len(ids), -1)
    with torch.no_grad():
        found = torch.log_softmax(model(tokens, positions, None)[:, :-1].float(), dim=-1)
    return found.gather(2, tokens[:, 1:, None]).flatten()


def losses(model: torch.nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss of each token."""
    batch, length = ids[:, 1:].shape
    positions = torch.arange(length, device=ids.device).expand(batch, -1)
    labels = ids[:, 1:].contiguous()
    return model(ids[:, :-1].contiguous(), positions, None, labels=labels, **options)


def fp8_states(
    experts: int,
    layout: RowLayout,
    backends: BackendChoice | None = None,
) -> tuple[Fp8State, list[Fp8State]]:
    """State of a grouped module, and that of each of its experts as a module of its own."""
    backends = backends or BackendChoice({"reference": ReferenceBackend()}, ["fp32"])
    names = tuple(f"experts.{i}.x" for i in range(experts))

    def state(name: str, experts: tuple[str, ...] = ()) -> Fp8State:
        codes = WeightCodes(layout, "fp32", WeightEpoch(), stacked=bool(experts))
        return Fp8State(name, codes, backends, "fp32", experts)

    return state("experts.x", names), [state(name) for name in names]


class Trainer:
    """Megatron's own DDP, schedule and optimizer around a BF16 model; ``fp8``: convert's keys."""

    def __init__(
        self,
        gpt: Any,
        *,
        fp8: dict | None = None,
        distributed: bool = False,
        lr: float = 2e-3,
        **ddp: Any,
    ) -> None:
        self.gpt, self.lr, config = gpt, lr, gpt.config
        options = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **ddp)
        self.ddp = DistributedDataParallel(config, options, Float16Module(config, gpt))
        self.conversion = None if fp8 is None else convert_alone(self.ddp, **fp8)
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = self.make_optimizer(use_distributed_optimizer=distributed)

    def make_optimizer(self, **options: Any) -> Any:
        config = OptimizerConfig(
            optimizer="adam",
            lr=self.lr,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            **options,
        )
        return get_megatron_optimizer(config, [self.ddp])

    def gradients(self, *batches: torch.Tensor) -> float:
        """Mean loss of the micro-batches; gradients are left in ``main_grad``."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def step(iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple:
            found = losses(model, next(iterator)).float()
            return found, lambda out: (out.mean(), {"loss": out.detach().mean()})

        seen = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=self.ddp,
            num_microbatches=len(batches),
            seq_length=batches[0].shape[1] - 1,
            micro_batch_size=len(batches[0]),
            forward_only=False,
        )
        return sum(float(each["loss"]) for each in seen) / len(seen)

    def update(self) -> float:
        """The optimizer's step; returns the gradient norm."""
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def step(self, *batches: torch.Tensor) -> tuple[float, float]:
        """Loss and gradient norm."""
        return self.gradients(*batches), self.update()


class Recording(ReferenceBackend):
    """A plugin's backend that notes the names of its products."""

    name = "recording"

    def __init__(self) -> None:
        self.calls: list[str] = []
        for product in ("fprop", "dgrad", "wgrad"):
            for name in (product, f"grouped_{product}"):
                setattr(self, name, self._noted(getattr(self, name)))

    def _noted(self, product: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(product.__name__)
            return product(*args)

        return call


@contextmanager
def one_process(**sizes: int) -> Iterator[CpuShim]:
    """Megatron's parallel state over this process alone."""
    shim = CpuShim()
    ours = not torch.distributed.is_initialized()
    with shim.active():
        init_gloo()
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(SEED)
    try:
        yield shim
    finally:
        parallel_state.destroy_model_parallel()
        if ours:
            torch.distributed.destroy_process_group()


def kept(module: Any) -> list[Quantized]:
    """The codes of a converted module that are in memory, of both sides."""
    codes = module.fp8_state.codes
    entry = codes._epoch.kept.get(codes)
    return [] if entry is None else [side for side in entry[1] if side is not None]


def quantized_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list that takes every weight that is quantized alone from now on, in order."""
    weights: list[torch.Tensor] = []
    quantize = weight_codes.quantize_weight

    def noted(weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        weights.append(weight)
        return quantize(weight, *args, **options)

    monkeypatch.setattr(weight_codes, "quantize_weight", noted)
    return weights
