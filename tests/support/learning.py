"""Training runs in BF16, in FP8 and in FP8 with pins, and what makes them differ; on a CPU.

megatron-core's own GPTModel of Qwen3's kind with random weights, DistributedDataParallel, float32
gradients and distributed optimizer (Adam), the reference GEMM backend. It learns one batch of
random tokens by heart, which tells recipes apart.

Beside the converted model there is an emulation of its numerics that shares no code with fp8rl; of
it parts can be left out, and the range of E4M3. ``error`` is that of the first gradient of all
linear layers against the float32 model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from transformers import Qwen3Config

from fp8rl import PluginManager, Recipe
from megatron_fp8rl import convert
from megatron_fp8rl.testing.models import build_gpt

FULL = frozenset({"activations", "weights", "dgrad", "wgrad"})


@dataclass(frozen=True)
class Variant:
    """How the linear layers multiply."""

    recipe: Mapping[str, Any] | None = None
    """Of ``megatron_fp8rl.convert``."""
    emulated: frozenset[str] = frozenset()
    """Products whose operands are rounded: ``activations`` and ``weights`` of fprop, ``dgrad``,
    ``wgrad``."""
    bounded: bool = True
    """E4M3's exponents, or any."""
    dtype: torch.dtype = torch.bfloat16


_POW2 = {key: {"scale_format": "pow2"} for key in ("weights", "activations")}
VARIANTS = {
    "float32": Variant(dtype=torch.float32),
    "BF16": Variant(),
    "FP8": Variant(recipe={}),
    "FP8, pow2 scales": Variant(recipe=_POW2),
    "FP8, first half pinned": Variant(recipe={"pins": {"first": 8}}),
    "FP8, last half pinned": Variant(recipe={"pins": {"last": 8}}),
    "FP8, o_proj and down_proj pinned": Variant(
        recipe={"pins": {"kinds": ["o_proj", "down_proj"]}}
    ),
    "emulated": Variant(emulated=FULL),
    "emulated, any exponent": Variant(emulated=FULL, bounded=False),
    "emulated, fprop alone": Variant(emulated=frozenset({"activations", "weights"})),
    "emulated, activations alone": Variant(emulated=frozenset({"activations"})),
    "emulated, weights alone": Variant(emulated=frozenset({"weights"})),
    "emulated, dgrad alone": Variant(emulated=frozenset({"dgrad"})),
    "emulated, wgrad alone": Variant(emulated=frozenset({"wgrad"})),
}


@dataclass(frozen=True)
class Setting:
    """A model and what it is trained on."""

    seed: int = 0
    rate: float = 2e-4
    steps: int = 12
    layers: int = 16
    hidden: int = 128
    rows: int = 4
    length: int = 64
    vocab: int = 2048

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 128),
            num_key_value_heads=1,
            head_dim=128,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
            # Logits spread as those of width 2,048 and 0.02, Qwen3-1.7B's.
            initializer_range=0.02 * (2048 / self.hidden) ** 0.5,
        )

    def batch(self) -> torch.Tensor:
        """Return the tokens of every step, int64 ``[rows, length + 1]``."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, self.vocab, (self.rows, self.length + 1), generator=generator)


@dataclass(frozen=True)
class Curve:
    """One training run."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """First gradients of the linear layers' weights, by parameter name."""

    def error(self, truth: Curve) -> float:
        """Relative error of the first gradient."""
        pairs = [(self.gradients[name], exact) for name, exact in truth.gradients.items()]
        wrong = sum((got - exact).square().sum() for got, exact in pairs)
        return float((wrong / sum(exact.square().sum() for _, exact in pairs)).sqrt())


def train(setting: Setting, variant: Variant) -> Curve:
    """Train from random weights; megatron's parallel state must be initialised."""
    plain = variant.dtype is torch.float32
    model = build_gpt(setting.config(), seed=setting.seed)
    if plain:  # from the same BF16 numbers
        weights = model.state_dict()
        model = build_gpt(setting.config(), dtype=torch.float32)
        model.load_state_dict(weights)
    config = model.config
    ddp = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        ),
        module=model if plain else Float16Module(config, model),
    )
    if variant.recipe is not None:
        convert(ddp, Recipe.from_dict(variant.recipe), plugins=PluginManager(discover=False))
    if variant.emulated:
        emulate(model, variant)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=setting.rate,
            weight_decay=0.0,
            bf16=not plain,
            params_dtype=variant.dtype,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [ddp],
    )
    positions = torch.arange(setting.length).expand(setting.rows, -1)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    tokens = setting.batch()
    for _ in range(setting.steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        labels = tokens[:, 1:].contiguous()
        loss = ddp(tokens[:, :-1].contiguous(), positions, None, labels=labels).float().mean()
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {
            name: parameter.main_grad.clone()
            for name, parameter in model.named_parameters()
            if ".linear_" in name and parameter.ndim == 2
        }
        finalize_model_grads([ddp])
        optimizer.step()
    return Curve(losses, gradients)


# ---- the emulation: nothing of fp8rl, no float8 dtype


def emulate(model: torch.nn.Module, variant: Variant) -> None:
    """Let the linear layers of a BF16 model multiply rounded operands, as ``variant`` says."""

    def forward(input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        return _Emulated.apply(input, weight, variant)

    for name, module in model.named_modules():
        if ".linear_" in name and hasattr(module, "_forward_impl"):
            module._forward_impl = forward


class _Emulated(torch.autograd.Function):
    """``x @ weight.T`` in float32 over rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, variant: Variant) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.variant = variant
        a = _rounded(x.flatten(0, -2), variant, "activations", 1)
        y = a @ _rounded(weight, variant, "weights", 128).t()
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        by_token = _rounded(grad, ctx.variant, "dgrad", 1)
        dx = by_token @ _rounded(weight, ctx.variant, "dgrad", 128)
        along_tokens = _rounded(grad.t(), ctx.variant, "wgrad", 1)
        weight.main_grad += along_tokens @ _rounded(rows.t(), ctx.variant, "wgrad", 1).t()
        weight.grad_added_to_main_grad = True
        return dx.to(x.dtype).view_as(x), torch.zeros_like(weight), None


def _rounded(x: torch.Tensor, variant: Variant, part: str, height: int) -> torch.Tensor:
    """``x`` with 3 bits of mantissa in blocks of ``height`` x 128 that reach up to 448."""
    if part not in variant.emulated:
        return x.float()
    rows, columns = x.shape
    size = -(-rows // height) * height, -(-columns // 128) * 128
    padded = torch.zeros(size, device=x.device)
    padded[:rows, :columns] = x
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // 128, 128)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(largest > 0, 448.0 / largest, torch.ones_like(largest))
    scaled = blocks * scale
    exponent = torch.frexp(scaled).exponent - 1
    if variant.bounded:
        exponent = exponent.clamp(min=-6)
    step = torch.ldexp(torch.ones_like(scaled), exponent - 3)
    return ((scaled / step).round() * step / scale).view_as(padded)[:rows, :columns]
