"""Shapes and bytes of a model's weights and KV cache on one rank, from its config alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8rl.gemm import GemmShape
from fp8rl.models.families import FUSED, Module
from fp8rl.models.pins import PinRow
from fp8rl.models.spec import ModelSpec, value_of
from fp8rl.numerics import BLOCK, cdiv
from fp8rl.recipe import KVDtype, ModuleKind

GIB = 1 << 30
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
    """Sizes of a model, split over parallel ranks.

    Args:
        spec: the model.
        ranks: tensor parallel size.
        expert_ranks: number of ranks over which the experts of a layer are spread as a whole
            (expert parallel). None: each rank has a part of every expert (tensor parallel).

    Raises:
        UnsupportedError: the family is not known.
        ModelError: a key that the sizes follow from is missing or no positive integer.
    """

    def __init__(self, spec: ModelSpec, ranks: int, *, expert_ranks: int | None = None) -> None:
        self._spec, self._ranks, self._expert_ranks = spec, ranks, expert_ranks
        numbers = spec.numbers
        heads = numbers["num_attention_heads"]
        self._kv_heads = numbers.get("num_key_value_heads", heads)
        self.head_size = numbers.get("head_dim") or numbers["hidden_size"] // heads
        self.heads = heads // ranks
        self.kv_heads = max(1, self._kv_heads // ranks)
        """KV heads of one rank; with more ranks than heads, several ranks hold the same head."""
        self._modules = {module.name: module for module in spec.modules}
        self._widths = self._rank_widths()

    def split_problem(self) -> str | None:
        """Why attention cannot be split over so many ranks, as vLLM would say at its start."""
        heads, kv_heads = self._spec.numbers["num_attention_heads"], self._kv_heads
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
        """Return the shape of the first linear layer of a kind, as vLLM runs it on one rank.

        Parts that vLLM fuses are one linear layer.
        """
        name, first = next(item for item in self._modules.items() if item[1].kind == kind)
        prefix, _, leaf = name.rpartition(".")
        parts = next((parts for parts in FUSED.values() if leaf in parts), (leaf,))
        held = [self._modules.get(f"{prefix}.{part}") for part in parts]
        rows = sum(self._shape(module)[0] for module in held if module is not None)
        return GemmShape(0, rows, self._shape(first)[1])

    def bytes(self, rows: Sequence[PinRow], itemsize: int, kv_dtype: KVDtype) -> Bytes:
        """Return the bytes of a rank with these modules, whose dtype has ``itemsize`` bytes."""
        fp8 = [row for row in rows if row.precision == "fp8"]
        codes = self._sum(fp8, math.prod)
        scales = 4 * self._sum(fp8, lambda shape: math.prod(map(cdiv, shape, BLOCK)))
        plain = (self.elements(rows) - codes) * itemsize
        plain += (4 - itemsize) * self._parameters(rows, float32=True)
        return Bytes(codes, scales, plain, self.kv_per_token(itemsize, kv_dtype, rows))

    def kv_per_token(
        self, itemsize: int, kv_dtype: KVDtype, rows: Sequence[PinRow] | None = None
    ) -> int:
        """Return the bytes of one token in the KV cache of one rank, which has ``rows``, or all."""
        latent = self._spec.family.attention.kv == "latent"
        each = self._widths["kv_a"] if latent else 2 * self.kv_heads * self.head_size
        each *= itemsize if kv_dtype == "auto" else 1
        if kv_dtype == "int8_per_token_head":
            each += 2 * self.kv_heads * 4  # scales in float32
        held = self._modules.values() if rows is None else rows
        # Linear attention caches no tokens, and its output layer is of another kind.
        return each * sum(module.kind == "o_proj" for module in held)

    def elements(self, rows: Sequence[PinRow]) -> int:
        """Return the number of parameters on one rank that has these modules."""
        weights = self._sum(rows, math.prod)
        biased = [row for row in rows if self._modules[row.name].bias]
        biases = self._sum(biased, lambda shape: shape[0])
        return weights + biases + self._parameters(rows)

    def beside_linears(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of norms, and of tensors that are no module's weight, by full name."""
        shapes = {}
        for name, module in self._modules.items():
            if module.kind != "norm":
                continue
            shapes[f"{name}.weight"] = self._shape(module)
            layer, _, leaf = name.rpartition(".")
            if leaf == "input_layernorm":
                for parameter in self._spec.layers[int(layer.rpartition(".")[2])].parameters:
                    shape = tuple(self._widths[width] for width in parameter.shape)
                    shapes[f"{layer}.{parameter.name}"] = shape
        return shapes

    def _sum(self, rows: Sequence[PinRow], count: Callable[[tuple[int, ...]], int]) -> int:
        """Add up ``count(shape)`` over the weights that one rank holds."""
        total = experts = 0
        for row in rows:
            held = count(self._shape(self._modules[row.name]))
            if row.kind == "experts":
                experts += held
            else:
                total += held
        return total + experts // (self._expert_ranks or 1)

    def _parameters(self, rows: Sequence[PinRow], *, float32: bool = False) -> int:
        """Count the elements of the tensors beside the modules, or of those kept in ``float32``.

        A layer counts where its first norm is among the rows.
        """
        return sum(
            math.prod(self._widths[width] for width in parameter.shape)
            for row in rows
            if row.layer is not None and row.name.endswith(".input_layernorm")
            for parameter in self._spec.layers[row.layer].parameters
            if parameter.float32 or not float32
        )

    def _shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of a module's weight on one rank; a tied output layer has no rows."""
        if module.kind == "lm_head" and self._spec.tied:
            return 0, self._widths["hidden"]
        if module.kind == "tower":
            return (_tower_elements(self._spec.vision) // self._ranks,)
        return tuple(self._widths[width] for width in module.shape)

    def _rank_widths(self) -> dict[str, int]:
        """Compute the widths that :attr:`fp8rl.models.families.Module.shape` names, on one rank."""
        spec, ranks = self._spec, self._ranks

        def get(key: str) -> int:
            return spec.numbers.get(key, 0)

        expert = get(spec.family.experts.width) if spec.family.experts else 0
        nope, rope, value = (get("qk_nope_head_dim"), get("qk_rope_head_dim"), get("v_head_dim"))
        gdn_k = get("linear_num_key_heads") * get("linear_key_head_dim")
        gdn_v = get("linear_num_value_heads") * get("linear_value_head_dim")
        return {
            "one": 1,
            "hidden": get("hidden_size"),
            "vocab": cdiv(get("vocab_size"), _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // ranks,
            "head": self.head_size,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "q": self.heads * self.head_size,
            "q_and_gate": 2 * self.heads * self.head_size,
            "kv": self.kv_heads * self.head_size,
            "mlp": get("intermediate_size") // ranks,
            "experts": spec.experts,
            "expert": expert // (1 if self._expert_ranks else ranks),
            "shared": spec.shared_width // ranks,
            "q_lora": get("q_lora_rank"),
            "kv_lora": get("kv_lora_rank"),
            "kv_a": get("kv_lora_rank") + rope,
            "mla_q": self.heads * (nope + rope),
            "mla_kv": self.heads * (nope + value),
            "mla_o": self.heads * value,
            "gdn_qkv": (2 * gdn_k + gdn_v) // ranks,
            "gdn_v": gdn_v // ranks,
            "gdn_heads": get("linear_num_value_heads") // ranks,
            "gdn_head": get("linear_value_head_dim"),
            "gdn_kernel": get("linear_conv_kernel_dim"),
        }


def _tower_elements(vision: Any) -> int:
    """Count the parameters of a Qwen3-VL-style vision tower."""

    def get(key: str, default: int = 0) -> int:
        return int(value_of(vision, key, default))

    hidden, middle, out = get("hidden_size"), get("intermediate_size"), get("out_hidden_size")
    patch = get("in_channels") * get("temporal_patch_size") * get("patch_size") ** 2
    merged = hidden * get("spatial_merge_size") ** 2
    merger = merged * merged + merged + out * merged + out
    block = 4 * hidden * hidden + 2 * middle * hidden + 9 * hidden + middle
    deep = len(value_of(vision, "deepstack_visual_indexes", ()))
    return (
        (patch + 1) * hidden
        + get("num_position_embeddings") * hidden
        + get("depth") * block
        + (merger + 2 * hidden)
        + deep * (merger + 2 * merged)
    )


def gib(count: int) -> str:
    """Write a number of bytes in GiB, e.g. ``1.25 GiB``."""
    return f"{count / GIB:.2f} GiB"


def mib(count: int) -> str:
    """Write a number of bytes in MiB, e.g. ``0.5 MiB``."""
    return f"{count / (1 << 20):.1f} MiB"
