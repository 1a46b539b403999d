"""What an exported folder holds: its FP8 weights, its BF16 modules and its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8rl.export.names import experts_of
from fp8rl.models.families import FUSED, Experts
from fp8rl.models.pins import PinPolicy
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import BLOCK
from fp8rl.recipe import Recipe
from fp8rl.weight_files import Watched, WeightFile

_NO_LINEAR = ("norm", "embed_tokens")
"""Kinds of modules that no engine would quantize, listed or not."""


@dataclass(frozen=True)
class Export:
    """An export that has been checked and can be written."""

    checkpoint: Path
    """Folder of the BF16 model."""
    config: Mapping[str, Any]
    """Its ``config.json``."""
    spec: ModelSpec
    """The same, read."""
    recipe: Recipe
    """Recipe of the rollouts."""
    policy: PinPolicy
    """Precision of each module."""
    files: Mapping[WeightFile, Sequence[str]]
    """Names of the tensors to read from each file, without KV scales."""
    copied: Sequence[Watched]
    """Files to copy: tokenizer and whatever else describes the model."""
    described: Sequence[Watched]
    """``config.json`` and index, as they were when they were read."""
    beside: Sequence[str]
    """Stored modules that are not part of the policy, such as draft layers: they stay in BF16."""
    kv_scales: Mapping[str, float]
    """KV scales by the names that stock engines read."""

    @property
    def tensors(self) -> int:
        """Number of tensors to read."""
        return sum(map(len, self.files.values()))

    def parts(self, tensor: str) -> list[str]:
        """Return the FP8 weights that a stored tensor holds; empty if it stays as it is.

        A tensor of all experts of a layer holds those of each expert, gate before up.
        """
        return self._parts.get(tensor, [])

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        experts = self.spec.family.experts
        found: dict[str, list[str]] = {}
        for row in self.policy.report():
            if row.precision == "fp8":
                found[f"{row.name}.weight"] = [f"{row.name}.weight"]
                container = experts_of(row.name)
                if experts and container:
                    leaf = row.name.rpartition(".")[2]
                    fused = experts.fused[leaf == experts.leaves[-1]]
                    found.setdefault(f"{container}.{fused}", []).append(f"{row.name}.weight")
        return found

    def quantization_config(self) -> dict[str, Any]:
        """Return the ``quantization_config``: keys of vLLM, SGLang, transformers, and the recipe.

        vLLM reads ``ignored_layers`` or, where that is empty, ``modules_to_not_convert``; SGLang
        the first that is there; transformers the second. An engine with ``quantization="fp8rl"``
        takes the recipe from here.
        """
        alone = [*left_alone(self.policy, self.spec.family.experts), *self.beside]
        formats = {self.recipe.weights.scale_format, self.recipe.activations.scale_format}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            **({"scale_fmt": "ue8m0"} if formats == {"pow2"} else {}),
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "ignored_layers": alone,
            "modules_to_not_convert": alone,
            "recipe": self.recipe.to_dict(),
        }


def left_alone(policy: PinPolicy, experts: Experts | None) -> list[str]:
    """Return the names of the modules in BF16 as engines look them up, sorted by layer.

    Besides the names of the checkpoint these are the names of fused modules and of all experts of a
    layer together, also under the name that vLLM gives their block: engines look for one form or
    the other, by whole names or by the start or end of a name.

    Args:
        policy: precision of each module.
        experts: names of the model's experts; None where it has none.
    """
    rows = {row.name: row for row in policy.report()}
    found: dict[str, None] = {}  # a set in order
    for name, row in rows.items():
        if row.precision == "fp8" or row.kind in _NO_LINEAR:
            continue
        container = experts_of(name)
        if container is not None:
            found[container] = None
            if experts is not None and experts.vllm_block:
                layer = container.removesuffix(f"{experts.block}.experts")
                found[f"{layer}{experts.vllm_block}.experts"] = None
            continue
        found[name] = None
        prefix, _, leaf = name.rpartition(".")
        for fused, parts in FUSED.items():
            if leaf == parts[-1]:
                found[f"{prefix}.{fused}"] = None
    return list(found | {"lm_head": None})  # a tied one has no tensor
