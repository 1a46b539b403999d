"""The modules of a layer; see the package."""

from __future__ import annotations

import abc
from typing import Any

import torch
from any_name import stand_in as __getattr__  # noqa: F401 - of this module


class Linear(torch.nn.Module):
    """A linear layer without bias on one rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not bias
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.use_bias = self.apply_bias = bias
        self.return_bias = return_bias
        weight = torch.empty(out_features, in_features, dtype=params_dtype, device="cpu")
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.empty(0)
        if init_method is not None:
            init_method(self.weight)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


class LayerNormLinear(Linear):
    """An RMS norm and a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **others)
        assert normalization == "RMSNorm"
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed)


class _Operation(torch.nn.Module, abc.ABC):
    """The base of TransformerEngine's norms: a class with abstract members."""

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool: ...


class RMSNorm(_Operation):
    """An RMS norm of rows."""

    is_fused_op = False

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DotProductAttention(torch.nn.Module):
    """Causal attention, of ``[s, b, heads, size]`` or of packed sequences."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        attn_mask_type: str = "causal",
        **others: Any,
    ) -> torch.Tensor:
        if qkv_format == "sbhd":
            assert "causal" in attn_mask_type
            return _attend(query, key, value)
        starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        assert attn_mask_type == "padding_causal" and starts is not None
        sizes = starts.diff().tolist()
        rows = zip(*(x.unsqueeze(1).split(sizes) for x in (query, key, value)), strict=True)
        return torch.cat([_attend(*each)[:, 0] for each in rows])


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return out.permute(2, 0, 1, 3).flatten(2)
