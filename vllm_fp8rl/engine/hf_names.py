"""`HfNames`: the HF names of an engine's modules and parameters.

A model inside a multimodal wrapper has other names in vLLM than in its checkpoint: Qwen3.5's
``model.language_model.layers.0`` is ``language_model.model.layers.0`` there. vLLM hands the map
of a model class to the quantization config; this is its inverse. Importing this does not import
vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fp8rl.models.families import Experts


class HfNames:
    """Engine names to HF names.

    Args:
        modules: HF names of the language model's modules, without ``.weight``.
        mapper: vLLM's ``WeightsMapper`` of the model class, without stacked entries; None where
            the class has none, and names are the same.
        experts: names of the model's experts; vLLM may give their block another name.
    """

    def __init__(
        self, modules: Iterable[str] = (), mapper: Any = None, experts: Experts | None = None
    ) -> None:
        self._blocks = ("", "")
        if experts is not None and experts.vllm_block:
            self._blocks = (f".{experts.vllm_block}.", f".{experts.block}.")
        self._known: dict[str, str] = {}
        self._prefixes: list[tuple[str, str]] = []
        if mapper is None:
            return
        self._rename = mapper._map_name  # 0.25.1 has no public one
        self._prefixes = [(new, hf) for hf, new in mapper.orig_to_new_prefix.items() if new]
        for hf_name in modules:
            self._learn(hf_name)

    def of(self, name: str) -> str:
        """Return the HF name of a module or parameter, by its name in the whole engine.

        The last part of a fused module's name stays as the engine has it (``qkv_proj``).
        """
        name = name.replace(*self._blocks) if self._blocks[0] else name
        known = name
        while known and known not in self._known:
            known = known.rpartition(".")[0]
        if known:
            return self._known[known] + name[len(known) :]
        for new, hf in self._prefixes:  # a module beside the language model
            hf_name = hf + name.removeprefix(new)
            if name.startswith(new) and self._rename(hf_name) == name:
                return hf_name
        return name

    def _learn(self, hf_name: str) -> None:
        """Note a module and its parents, as far up as their names end alike."""
        renamed = self._rename(f"{hf_name}.weight")
        name = None if renamed is None else renamed.removesuffix(".weight")
        while name and hf_name and name not in self._known:
            self._known[name] = hf_name
            (name, _, leaf), (hf_name, _, hf_leaf) = name.rpartition("."), hf_name.rpartition(".")
            if leaf != hf_leaf:
                return
