"""Modules of vLLM that round otherwise than the trainer, replaced while a model is built.

torch's public hook on the registration of a submodule replaces them, so that vLLM's classes stay as
they are, and with them the other engines of a process. ``CustomOp.register_oot`` would replace a
class for all engines and give it another name in ``custom_ops``; and ``get_rope`` hands one object
to all engines, which therefore must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook as on_registration
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import Recipe
from vllm_fp8rl.kernels.rounding import Float32Rotary, RoundedOnceSiluAndMul, kept_reason

logger = init_logger("vllm.fp8rl")


class ModuleReplacement:
    """Replaces modules of one engine while its model is built, until :meth:`close`.

    Rotary embeddings of the language model with ``rope_dtype: float32``, SwiGLU on a GPU where
    nothing is compiled, and with ``exact`` norms, rotary embeddings and SwiGLU.
    """

    def __init__(self, engine: VllmConfig, recipe: Recipe) -> None:
        self._engine = engine
        self._exact = recipe.exact
        self._rotary = recipe.rope_dtype == "float32" and not recipe.exact
        eager = engine.compilation_config.mode == CompilationMode.NONE
        on_gpu = engine.device_config.device_type == "cuda"
        self._swiglu = recipe.exact or (recipe.rollout and eager and on_gpu)
        self._made: dict[torch.nn.Module, torch.nn.Module | None] = {}
        self._handle: Any = None
        if self._exact or self._rotary or self._swiglu:
            replace: Callable[..., Any] = self._replace  # torch's annotation forgets the result
            self._handle = on_registration(replace)

    def close(self) -> None:
        """End it, because all layers have been built; may be called any number of times."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._rotary and not any(isinstance(new, Float32Rotary) for new in self._made.values()):
            logger.warning(
                "fp8rl: rope_dtype 'float32' changed nothing: this model has no rotary embedding "
                "that can take it."
            )
        made = list(self._made.values())
        self._made.clear()
        if self._exact:
            self._require_exact(made)

    def _require_exact(self, made: list[torch.nn.Module | None]) -> None:
        """Raise UnsupportedError if a model was built without one of the modules.

        Or if ranks, which all have built it now, do not add as the trainer's do.
        """
        from vllm_fp8rl.kernels.exact import ExactRMSNorm, ExactRotary, ExactSiluAndMul, check_sums

        needed = [(ExactRMSNorm, "RMSNorm"), (ExactRotary, "RotaryEmbedding")]
        if not getattr(self._engine.model_config.hf_text_config, "num_experts", 0):
            needed.append((ExactSiluAndMul, "SiluAndMul"))
        for ours, upstream in needed:
            if not any(isinstance(new, ours) for new in made):
                raise UnsupportedError(
                    f"exact needs vLLM's {upstream} in the model, and none was built; choose "
                    "another model, or set exact to false in the recipe."
                )
        check_sums(self._engine)

    def _replace(
        self, parent: torch.nn.Module, name: str, module: torch.nn.Module | None
    ) -> torch.nn.Module | None:
        """Return what ``parent`` gets in the place of ``module``; None where it stays."""
        # Towers call theirs "rotary_pos_emb". They read its table, which must have their dtype.
        is_rotary = name == "rotary_emb" and isinstance(module, RotaryEmbeddingBase)
        rotary = is_rotary and (self._rotary or self._exact)
        norm = self._exact and type(module) is RMSNorm
        swiglu = self._swiglu and type(module) is SiluAndMul
        if module is None or not (rotary or norm or swiglu):
            return None
        current = get_current_vllm_config_or_none()
        if current is None or current.quant_config is not self._engine.quant_config:
            return None  # another engine is built; this one's build may have broken off
        if module not in self._made:
            if rotary and not self._exact:
                self._made[module] = self._new_rotary(module)
            else:
                self._made[module] = self._new_swiglu() if swiglu else self._new_exact(module)
        return self._made[module]

    def _new_exact(self, module: Any) -> torch.nn.Module | None:
        from vllm_fp8rl.kernels.exact import ExactRMSNorm, ExactRotary, unserved_rotation

        if isinstance(module, ExactRotary):
            return None
        if isinstance(module, RMSNorm):
            return ExactRMSNorm(module)
        reason = unserved_rotation(module, self._engine)
        if reason is not None:
            raise UnsupportedError(
                f"exact does not serve the rotary embedding of this model: {reason}; choose "
                "another model, or set exact to false in the recipe."
            )
        return ExactRotary(module)

    def _new_rotary(self, rope: Any) -> Float32Rotary | None:
        if isinstance(rope, Float32Rotary):
            return None
        reason = kept_reason(rope, self._engine)
        if reason is None:
            return Float32Rotary(rope)
        logger.warning_once("fp8rl: a rotary embedding keeps vLLM's dtype: %s.", reason)
        return None

    def _new_swiglu(self) -> SiluAndMul:
        if self._exact:
            from vllm_fp8rl.kernels.exact import ExactSiluAndMul

            return ExactSiluAndMul()
        return RoundedOnceSiluAndMul()
