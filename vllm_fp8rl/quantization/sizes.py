"""Shapes and bytes of a model's weights on one rank, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8rl.gemm import GemmShape
from fp8rl.numerics import BLOCK, cdiv
from fp8rl.pinning import FUSED, PinRow, kind_of
from fp8rl.recipe import ModuleKind

_VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary (vocab_parallel_embedding.py)


@dataclass(frozen=True)
class Bytes:
    """Bytes of the weights on one rank, and of one token in its KV cache."""

    codes: int
    scales: int
    plain: int
    """Bytes of weights in the model's dtype."""
    kv_per_token: int

    @property
    def weights(self) -> int:
        return self.codes + self.scales + self.plain


class Sizes:
    """Sizes of a dense Llama/Qwen3-style or Qwen3-MoE model, split over tensor-parallel ranks.

    Args:
        config: transformers config of the model.
        ranks: tensor parallel size.
    """

    def __init__(self, config: Any, ranks: int) -> None:
        self._config = config
        self._ranks = ranks
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads = heads // ranks
        self.kv_heads = max(1, kv_heads // ranks)
        """KV heads of one rank; with more ranks than heads, several ranks hold the same head."""

    def split_problem(self) -> str | None:
        """Why attention cannot be split over so many ranks, as vLLM would say at its start."""
        heads = self._config.num_attention_heads
        kv_heads = getattr(self._config, "num_key_value_heads", None) or heads
        if heads % self._ranks:
            name, count = "num_attention_heads", heads
        elif max(kv_heads, self._ranks) % min(kv_heads, self._ranks):
            name, count = "num_key_value_heads", kv_heads
        else:
            return None
        return (
            f"tensor parallel size {self._ranks} does not fit {name}={count}; choose a divisor of "
            "it."
        )

    def linear(self, kind: ModuleKind) -> GemmShape:
        """Return the shape of the fused linear layer of a kind, as vLLM runs it on one rank."""
        shapes = [self._shape(leaf) for leaf in FUSED.get(kind, (kind,))]
        return GemmShape(0, sum(rows for rows, _ in shapes), shapes[0][1])

    def bytes(self, rows: list[PinRow], itemsize: int, kv_itemsize: int) -> Bytes:
        """Return the bytes of one rank.

        Args:
            rows: resolved table of all modules.
            itemsize: bytes of an element in the model's dtype.
            kv_itemsize: bytes of an element in the KV cache.
        """
        codes = scales = plain = 0
        for row in rows:
            out, columns = self._shape(row.name)
            if row.precision == "fp8":
                codes += out * columns
                scales += 4 * cdiv(out, BLOCK[0]) * cdiv(columns, BLOCK[1])
            else:
                plain += out * columns * itemsize
        layers = self._config.num_hidden_layers
        kv = 2 * self.kv_heads * self.head_size * kv_itemsize * layers
        return Bytes(codes, scales, plain + self._small() * itemsize, kv)

    def _shape(self, name: str) -> tuple[int, int]:
        """Return the shape of a module's weight on one rank; a tied output layer has no rows."""
        config, leaf, kind = self._config, name.rpartition(".")[2], kind_of(name)
        hidden = config.hidden_size
        if kind == "norm":
            return 1, hidden
        if kind == "router":
            return config.num_experts, hidden
        if kind in ("embed_tokens", "lm_head"):
            if kind == "lm_head" and getattr(config, "tie_word_embeddings", False):
                return 0, hidden
            return cdiv(config.vocab_size, _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // self._ranks, hidden
        if kind in ("qkv_proj", "o_proj"):
            width = self.head_size * (self.kv_heads if leaf in ("k_proj", "v_proj") else self.heads)
        elif kind == "experts":
            width = config.moe_intermediate_size // self._ranks
        else:
            width = config.intermediate_size // self._ranks
        return (hidden, width) if leaf in ("o_proj", "down_proj") else (width, hidden)

    def _small(self) -> int:
        """Return the elements of norms of queries and keys, and of biases."""
        config = self._config
        each = 2 * self.head_size if config.model_type in ("qwen3", "qwen3_moe") else 0
        if getattr(config, "attention_bias", False) or config.model_type == "qwen2":
            each += (self.heads + 2 * self.kv_heads) * self.head_size
        return each * config.num_hidden_layers
