"""A layer of Megatron's and its linear layers, and fair timing of variants that take turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.benchmark import Timer

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.layers.linear import Fp8Linear


def shape_of(config: Mapping[str, Any], **changes: Any) -> Any:
    """Return the values of a ``config.json`` as transformers reads them, for :func:`build`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**config, **changes})


def build(shape: Any, *, device: str = "cuda", **overrides: Any) -> Any:
    """Build a GPTModel of the local spec; attention on a GPU is torch's flash attention.

    Megatron's own needs TransformerEngine to be more than three kernels.
    """
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_fp8rl.testing.attention import UnroundedAttention
    from megatron_fp8rl.testing.models import build_gpt

    options = {
        "use_cpu_initialization": device == "cpu",
        "bias_activation_fusion": True,
        "masked_softmax_fusion": False,
    }
    model = build_gpt(shape, **{**options, **overrides}).to(device)
    for layer in model.decoder.layers:
        scale = layer.self_attention.core_attention.softmax_scale
        layer.self_attention.core_attention = UnroundedAttention(
            model.config, layer.layer_number, AttnMaskType.causal, "self", softmax_scale=scale
        )
    return model


class LayerPass:
    """Forward and backward of the first layer of a model."""

    def __init__(self, model: Any, tokens: int, sequence: int, main_grad: bool = False) -> None:
        self.layer = model.decoder.layers[0]
        self.rotary = model.rotary_pos_emb(sequence)
        shape = (sequence, tokens // sequence, model.config.hidden_size)
        options: Any = {"device": next(model.parameters()).device, "dtype": torch.bfloat16}
        self.x = torch.randn(shape, **options).requires_grad_()
        self.grad = torch.randn(shape, **options) * 1e-3
        self.main_grad = main_grad
        for module in self.layer.modules() if main_grad else ():
            if hasattr(module, "gradient_accumulation_fusion"):
                module.gradient_accumulation_fusion = isinstance(module, Fp8Linear)
        for parameter in self.layer.parameters() if main_grad else ():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def forward(self) -> None:
        """Run without gradients, as log-probabilities are computed."""
        with torch.no_grad():
            self.layer(self.x, attention_mask=None, rotary_pos_emb=self.rotary)

    def __call__(self) -> None:
        """Run forward and backward."""
        y, _ = self.layer(self.x, attention_mask=None, rotary_pos_emb=self.rotary)
        y.backward(self.grad)
        self.x.grad = None
        for parameter in self.layer.parameters():
            if self.main_grad and parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None


class LinearsPass:
    """Forward and backward of linear layers, each with an input and a gradient of its own."""

    def __init__(self, modules: list[Any], tokens: int, like: LinearsPass | None = None) -> None:
        self.modules = modules
        self.keeping = ExitStack()
        self.inputs: list[torch.Tensor]
        self.grads: list[torch.Tensor]
        if like is not None:
            self.inputs, self.grads = like.inputs, like.grads
            return
        weight = modules[0].weight
        options: Any = {"device": weight.device, "dtype": torch.bfloat16}
        shapes = [module.weight.shape for module in modules]
        self.inputs = [torch.randn(tokens, 1, k, **options).requires_grad_() for _, k in shapes]
        self.grads = [torch.randn(tokens, 1, n, **options) * 1e-3 for n, _ in shapes]

    def accumulate(self) -> LinearsPass:
        """Add weight gradients to a float32 ``main_grad``, as under megatron's DDP."""
        for module in self.modules:
            module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
            module.gradient_accumulation_fusion = isinstance(module, Fp8Linear)
        return self

    def __call__(self) -> None:
        outputs = []
        for module, x in zip(self.modules, self.inputs, strict=True):
            y = module(x)
            outputs.append(y[0] if isinstance(y, tuple) else y)
        for y, grad in reversed(list(zip(outputs, self.grads, strict=True))):
            y.backward(grad)
        for module, x in zip(self.modules, self.inputs, strict=True):
            weight = module.weight
            if weight.grad is not None and hasattr(weight, "main_grad"):
                weight.main_grad.add_(weight.grad)  # what DDP does without apex's fused kernel
            x.grad = weight.grad = None


def linears(model: Any) -> list[Any]:
    """Return the four linear layers of the first layer."""
    layer = model.decoder.layers[0]
    attention, mlp = layer.self_attention, layer.mlp
    places = [(attention, "linear_qkv"), (attention, "linear_proj")]
    places += [(mlp, "linear_fc1"), (mlp, "linear_fc2")]
    if not all(hasattr(owner, name) for owner, name in places):
        raise UnsupportedError(
            "The first layer has experts or latent attention, so its linear layers are not timed "
            "apart; look at the whole layer."
        )
    return [getattr(owner, name) for owner, name in places]


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, float]:
    """Return the median milliseconds of one call of each variant.

    The variants take turns, ``calls`` at a time after one that does not count, in another order
    each round. So a GPU that gets warm slows down for all of them, and the clock that the power of
    one variant leaves to the next is not always that of the same.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(3):
            call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name, call in shuffled.sample(list(variants.items()), len(variants)):
            call()
            timer = Timer("call()", globals={"call": call})  # which waits for the GPU
            times[name].append(1e3 * timer.timeit(calls).mean)
    return {name: statistics.median(values) for name, values in times.items()}
