"""Rotation and SwiGLU that round as in the trainer.

The rotation has cos and sin in float32, as in TransformerEngine's fused kernel. vLLM keeps them in
the model's dtype. The fused kernel computes them from float32 angles, multiplies in float32 and
rounds once (``transformer_engine/common/fused_rope/fused_rope.cu``).
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase

Rotated = tuple[torch.Tensor, torch.Tensor | None]


class Float32Rotary(RotaryEmbedding):
    """Rotation of BF16 queries and keys in float32, rounded once.

    Args:
        rope: module of vLLM whose frequencies it uses; :func:`kept_reason` of it is None.
    """

    def __init__(self, rope: RotaryEmbedding) -> None:
        super().__init__(
            rope.head_size,
            rope.rotary_dim,
            rope.max_position_embeddings,
            rope.base,
            rope.is_neox_style,
            torch.float32,
            init_cache=False,
        )
        self.register_buffer("cos_sin_cache", rope._compute_cos_sin_cache(), persistent=False)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Rotated:
        """Rotate ``[tokens, heads * head_size]``; in compiled engines Inductor fuses it."""
        table = self.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(-2)
        cos, sin = table.chunk(2, -1)
        return (
            self._rotated(query, cos, sin),
            None if key is None else self._rotated(key, cos, sin),
        )

    def forward_cpu(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Rotated:
        """Rotate in torch, because vLLM's kernel for CPUs takes one dtype for all tensors."""
        return self.forward_native(positions, query, key)

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Rotated:
        """Rotate in place by vLLM's kernel, which takes a float32 table for BF16 queries."""
        table = self.cos_sin_cache
        ops.rotary_embedding(positions, query, key, self.head_size, table, self.is_neox_style)
        return query, key

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = rounded(x.view(len(cos), -1, self.head_size))
        turned, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        if self.is_neox_style:
            a, b = turned.float().chunk(2, -1)
        else:
            a, b = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
        # Rounded before they are joined: Inductor may write to memory what is joined.
        both = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
        joined = torch.cat(both, -1) if self.is_neox_style else torch.stack(both, -1).flatten(-2)
        return torch.cat((joined, rest), -1).view(x.shape)


class RoundedOnceSiluAndMul(SiluAndMul):
    """``silu(gate) * up`` in float32, rounded once; vLLM's kernel rounds ``silu(gate)`` too.

    It serves engines that are not compiled, as compiled ones and the trainer round.
    """

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[.., K]`` for gate and up side by side in ``[.., 2 K]``."""
        return swiglu_on_gpu(x)


def swiglu_on_gpu(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` ``[.., K]`` for both side by side ``[.., 2 K]``, rounded once."""
    from fp8rl.numerics.triton.swiglu import silu_and_mul  # needs Triton

    return silu_and_mul(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return a BF16 tensor whose values are rounded inside Inductor's kernels too.

    Between two operations that it fuses, such as the norm of a query and its rotation, Inductor
    drops the rounding to BF16. It keeps integer arithmetic.
    """
    return nearest_bf16(x.float()).to(x.dtype) if x.dtype == torch.bfloat16 else x


def nearest_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 values to the nearest ones of BF16, by their bits.

    Ties, one value in 65,536, go away from zero. To even takes three operations more, with which
    Inductor (torch 2.11) splits the rotation into three kernels.
    """
    nearest = (x.view(torch.int32) + 0x8000) & -0x10000
    return torch.where(x == x, nearest.view(torch.float32), x)  # NaN stays NaN


def kept_reason(rope: RotaryEmbeddingBase, engine: VllmConfig) -> str | None:
    """Return why a rotary embedding stays as vLLM has it, or None.

    :class:`Float32Rotary` is right where Megatron-Core calls TransformerEngine's fused kernel
    (``megatron/core/models/common/embeddings/rope_utils.py``, ``apply_rotary_pos_emb``).
    """
    if engine.model_config.use_mla:
        return "Megatron-Core rotates queries and keys of MLA with cos and sin in BF16"
    if engine.compilation_config.pass_config.enable_qk_norm_rope_fusion:
        return "vLLM's 'enable_qk_norm_rope_fusion' has a kernel of its own"
    for method in ("forward_native", "forward_cuda"):
        if getattr(type(rope), method) is not getattr(RotaryEmbedding, method):
            return f"vLLM's {type(rope).__name__} has a rotation of its own"
    if getattr(rope, "mscale", 1.0) != 1.0:
        return "where YaRN scales cos and sin (mscale), Megatron-Core rotates in BF16"
    return None
