"""Shapes and bytes of a model's weights and KV cache on one rank, from its config alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fp8rl.errors import ModelError
from fp8rl.families import check_count
from fp8rl.gemm import GemmShape
from fp8rl.numerics import BLOCK, cdiv
from fp8rl.pinning import FUSED, PinRow, kind_of
from fp8rl.recipe import ModuleKind

GIB = 1 << 30
_VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary (vocab_parallel_embedding.py)
_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
_WIDEST = 2**31 - 1


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
    """Sizes of a dense Llama/Qwen3-style or Qwen3-MoE model, split over parallel ranks.

    Args:
        config: transformers config of the language model, or an object with the same attributes
            (:meth:`from_dict`).
        ranks: tensor parallel size.
        expert_ranks: number of ranks over which the experts of a layer are spread as a whole
            (expert parallel). None: each rank has a part of every expert (tensor parallel).
    """

    def __init__(self, config: Any, ranks: int, *, expert_ranks: int | None = None) -> None:
        self._config = config
        self._ranks = ranks
        self._expert_ranks = expert_ranks
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads = heads // ranks
        self.kv_heads = max(1, kv_heads // ranks)
        """KV heads of one rank; with more ranks than heads, several ranks hold the same head."""

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], ranks: int, *, expert_ranks: int | None = None
    ) -> Sizes:
        """Make the sizes from the values of a ``config.json``; see the class for the arguments.

        Raises:
            ModelError: a key that the sizes follow from is missing or no positive integer.
        """
        values = {"model_type": "", **(config.get("text_config") or config)}
        if "num_local_experts" in values:  # transformers 5 writes this name
            values["num_experts"] = values["num_local_experts"]
        moe = ("moe_intermediate_size",) if values.get("num_experts") else ()
        given = [key for key in ("num_key_value_heads", "head_dim") if values.get(key) is not None]
        for key in (*_NEEDED, *moe, *given):
            if key not in values:
                raise ModelError(f"The model's config.json has no key '{key}'; correct it.")
            check_count(key, values[key], _WIDEST)
        return cls(SimpleNamespace(**values), ranks, expert_ranks=expert_ranks)

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

    def bytes(self, rows: Sequence[PinRow], itemsize: int, kv_itemsize: int) -> Bytes:
        """Return the bytes of one rank.

        Args:
            rows: resolved table of all modules on the rank.
            itemsize: bytes of an element in the model's dtype.
            kv_itemsize: bytes of an element in the KV cache.
        """
        fp8 = [row for row in rows if row.precision == "fp8"]
        codes = self._sum(fp8, lambda out, columns: out * columns)
        scales = 4 * self._sum(
            fp8, lambda out, columns: cdiv(out, BLOCK[0]) * cdiv(columns, BLOCK[1])
        )
        kv = 2 * self.kv_heads * self.head_size * kv_itemsize * _layers(rows)
        return Bytes(codes, scales, (self.elements(rows) - codes) * itemsize, kv)

    def elements(self, rows: Sequence[PinRow]) -> int:
        """Return the number of parameters on one rank that has these modules."""
        matrices = self._sum(rows, lambda out, columns: out * columns)
        return matrices + self._small() * _layers(rows)

    def _sum(self, rows: Sequence[PinRow], count: Callable[[int, int], int]) -> int:
        """Add up ``count(rows, columns)`` over the weights that one rank holds."""
        total = experts = 0
        for row in rows:
            held = count(*self._shape(row.name))
            if row.kind == "experts":
                experts += held
            else:
                total += held
        return total + experts // (self._expert_ranks or 1)

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
            width = config.moe_intermediate_size // (1 if self._expert_ranks else self._ranks)
        else:
            width = config.intermediate_size // self._ranks
        return (hidden, width) if leaf in ("o_proj", "down_proj") else (width, hidden)

    def _small(self) -> int:
        """Return the elements of a layer's norms of queries and keys, and of its biases."""
        config = self._config
        each = 2 * self.head_size if config.model_type in ("qwen3", "qwen3_moe") else 0
        if getattr(config, "attention_bias", False) or config.model_type == "qwen2":
            each += (self.heads + 2 * self.kv_heads) * self.head_size
        return each


def gib(count: int) -> str:
    """Write a number of bytes in GiB, e.g. ``1.25 GiB``."""
    return f"{count / GIB:.2f} GiB"


def mib(count: int) -> str:
    """Write a number of bytes in MiB, e.g. ``0.5 MiB``."""
    return f"{count / (1 << 20):.1f} MiB"


def _layers(rows: Sequence[PinRow]) -> int:
    """Return the number of decoder layers that have attention."""
    return sum(row.kind == "o_proj" for row in rows)
