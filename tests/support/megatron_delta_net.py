"""Qwen3.5's layers in megatron's local spec: what they lack without TransformerEngine and FLA.

Megatron-core 0.16.1 builds gated delta nets from TransformerEngine's spec, with kernels of
flash-linear-attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_fp8rl.hf_names import linear_attention_layers
from megatron_fp8rl.testing.local_spec import Patch, apply
from megatron_fp8rl.testing.models import build_gpt, transformer_config


def build_hybrid(hf_config: Any, **options: Any) -> Any:
    """Build a Qwen3.5 as :func:`build_gpt` builds other models; within :func:`delta_nets`."""
    fields = config_fields(hf_config)
    config = transformer_config(hf_config, **fields, **options)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # 0.20 has another function for delta nets
    spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm")
    spec = hybrid_spec(spec, config)
    return build_gpt(hf_config, transformer_layer_spec=spec, **fields, **options)


def config_fields(hf_config: Any) -> dict[str, Any]:
    """Return what a ``TransformerConfig`` has for a Qwen3.5 beside what every model has."""
    linear = [kind == "linear_attention" for kind in hf_config.layer_types]
    return {
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(flag) for flag in linear],
        "linear_conv_kernel_dim": hf_config.linear_conv_kernel_dim,
        "linear_key_head_dim": hf_config.linear_key_head_dim,
        "linear_value_head_dim": hf_config.linear_value_head_dim,
        "linear_num_key_heads": hf_config.linear_num_key_heads,
        "linear_num_value_heads": hf_config.linear_num_value_heads,
    }


def hybrid_spec(spec: Any, config: Any) -> Any:
    """Put gated delta nets into the layers of a spec that have no attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    linear = linear_attention_layers(config)
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
    for layer, flag in zip(spec.layer_specs, linear, strict=True):
        if flag:
            layer.submodules.self_attention = ModuleSpec(
                module=GatedDeltaNet,
                submodules=GatedDeltaNetSubmodules(
                    in_proj=ColumnParallelLinear,
                    out_norm=WrappedTorchNorm,
                    out_proj=RowParallelLinear,
                ),
            )
    return spec


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm that multiplies by ``1 + weight``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gamma = 1 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), gamma.shape, gamma, self.eps).to(x.dtype)


@contextmanager
def delta_nets() -> Iterator[None]:
    """A region in which local norms may be zero-centered and delta nets run without FLA."""
    with ExitStack() as stack:
        new = _zero_centered(WrappedTorchNorm.__new__)
        apply(stack, [(WrappedTorchNorm, "__new__", new), *patches()])
        yield


def _zero_centered(build: Any) -> Any:
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        local = copy.copy(config)
        local.layernorm_zero_centered_gamma = False
        norm: Any = build(cls, local, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            norm.__class__ = ZeroCenteredRMSNorm
            norm.weight.data.zero_()
        return norm

    return __new__


def patches() -> list[Patch]:
    """Return what stands for flash-linear-attention where it is not installed."""
    from megatron.core.ssm import gated_delta_net

    if getattr(gated_delta_net, "HAVE_FLA", True):
        return []
    stand_ins = {
        "HAVE_FLA": True,
        "l2norm": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
        "causal_conv1d": _causal_conv1d,  # 0.16 has torch's in its place
        "chunk_gated_delta_rule": gated_delta_net.torch_chunk_gated_delta_rule,
    }
    # In 0.20 it is a package, and its modules read the names.
    parts = [getattr(gated_delta_net, name, None) for name in ("common", "gdn")]
    modules = [gated_delta_net, *filter(None, parts)]
    return [(module, *stand_in) for module in modules for stand_in in stand_ins.items()]


def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Convolve ``x`` ``[batch, tokens, channels]`` by ``[channels, width]``, then apply SiLU."""
    channels, width = weight.shape
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=channels)
    return torch.nn.functional.silu(out).transpose(1, 2), None
