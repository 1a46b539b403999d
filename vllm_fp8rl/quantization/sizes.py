"""Shapes and bytes of a model's weights on one rank, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp8rl.gemm import GemmShape
from fp8rl.numerics import BLOCK, cdiv
from fp8rl.pinning import PinRow, kind_of
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
        for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
            larger, smaller = max(count, self._ranks), min(count, self._ranks)
            if larger % smaller or (name == "num_attention_heads" and count < self._ranks):
                return (
                    f"tensor parallel size {self._ranks} does not fit {name}={count}; choose a "
                    "divisor of it."
                )
        return None

    def linear(self, kind: ModuleKind) -> GemmShape:
        """Return the shape of the fused linear layer of a kind, as vLLM runs it on one rank."""
        hidden, width = self._config.hidden_size, self._config.intermediate_size // self._ranks
        shapes = {
            "qkv_proj": ((self.heads + 2 * self.kv_heads) * self.head_size, hidden),
            "o_proj": (hidden, self.heads * self.head_size),
            "gate_up_proj": (2 * width, hidden),
            "down_proj": (hidden, width),
        }
        rows, columns = shapes[kind]
        return GemmShape(0, rows, columns)

    def bytes(self, rows: list[PinRow], itemsize: int, kv_itemsize: int) -> Bytes:
        """Return the bytes of one rank.

        Args:
            rows: resolved table of all modules.
            itemsize: bytes of an element in the model's dtype.
            kv_itemsize: bytes of an element in the KV cache.
        """
        codes = scales = plain = 0
        for row in rows:
            for out, columns in self._shapes(row.name):
                if row.precision == "fp8":
                    codes += out * columns
                    scales += 4 * cdiv(out, BLOCK[0]) * cdiv(columns, BLOCK[1])
                else:
                    plain += out * columns * itemsize
        layers = self._config.num_hidden_layers
        kv = 2 * self.kv_heads * self.head_size * kv_itemsize * layers
        return Bytes(codes, scales, plain + self._small() * itemsize, kv)

    def _shapes(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the shapes of a module's share of its layer's weight on one rank."""
        config, leaf, kind = self._config, name.rpartition(".")[2], kind_of(name)
        hidden = config.hidden_size
        if kind in ("embed_tokens", "lm_head"):
            if kind == "embed_tokens" or not getattr(config, "tie_word_embeddings", False):
                padded = cdiv(config.vocab_size, _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
                yield padded // self._ranks, hidden
        elif kind == "norm":
            yield 1, hidden
        elif kind == "router":
            yield config.num_experts, hidden
        elif kind in ("qkv_proj", "o_proj"):
            heads = self.kv_heads if leaf in ("k_proj", "v_proj") else self.heads
            features = heads * self.head_size
            yield (hidden, features) if kind == "o_proj" else (features, hidden)
        else:
            expert = kind == "experts"
            width = config.moe_intermediate_size if expert else config.intermediate_size
            width //= self._ranks
            yield (hidden, width) if leaf == "down_proj" else (width, hidden)

    def _small(self) -> int:
        """Return the elements of norms of queries and keys, and of biases."""
        config = self._config
        each = 2 * self.head_size if config.model_type in ("qwen3", "qwen3_moe") else 0
        if getattr(config, "attention_bias", False) or config.model_type == "qwen2":
            each += (self.heads + 2 * self.kv_heads) * self.head_size
        return each * config.num_hidden_layers
