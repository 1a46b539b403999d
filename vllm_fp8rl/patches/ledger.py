"""Every patch of vLLM as one record: what, why, and until when; how is in its replacement.

:func:`install` compares each target with its record before it changes anything, so that a vLLM
that has moved or changed it is refused by name. What :data:`GATES` record is also replaced by a
request gate, on one engine object, while that refuses requests. Every patch leaves
engines without ``quantization="fp8rl"`` as they were, and may be installed any number of times.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.compat import remedy
from vllm_fp8rl.patches.packing import keep_unpacked
from vllm_fp8rl.patches.plain_loads import check_plain_loads
from vllm_fp8rl.patches.reload import begin_layerwise, finish_layerwise, reload_in_place
from vllm_fp8rl.patches.requests import ask_before_first, reset_and_tell, rpc_unless_busy

_MARK = "fp8rl_patch"
_ROWS = "docs/upgrading.md, rows 1 to 4"


@dataclass(frozen=True)
class Patch:
    """One function of vLLM that is replaced: in its class, on single objects, or in its module and
    wherever that function has been imported by name."""

    module: str
    target: str
    """``Class.function``, or ``function``, in the module."""
    parameters: tuple[str, ...]
    """Parameters of the target that the replacement relies on."""
    why: str
    until: str
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    """Takes the function and returns its replacement; None where it stays in its class, because a
    request gate replaces it on single objects."""

    def check(self) -> tuple[Any, str, Callable[..., Any]]:
        """Return owner, name and function; UnsupportedError where something is missing."""
        class_name, _, name = self.target.rpartition(".")
        module = sys.modules[self.module]
        owner: Any = getattr(module, class_name, None) if class_name else module
        function = getattr(owner, name, None)
        abstract = getattr(function, "__isabstractmethod__", False)  # a base class has it
        if function is None or abstract:
            raise UnsupportedError(
                f"vllm_fp8rl patches '{self.module}.{self.target}', which this vLLM does not have "
                f"({_ROWS}); {remedy()}."
            )
        known = inspect.signature(function).parameters
        passes_all_on = any(each.kind is each.VAR_KEYWORD for each in known.values())
        missing = [parameter for parameter in self.parameters if parameter not in known]
        if missing and not passes_all_on:
            raise UnsupportedError(
                f"vllm_fp8rl patches '{self.module}.{self.target}', whose parameter "
                f"'{missing[0]}' this vLLM does not have ({_ROWS}); {remedy()}."
            )
        return owner, name, function


_CACHE_UNTIL = "vLLM tells workers or quantization methods about resets of the cache"
ENGINE_CORE = (
    Patch(
        "vllm.v1.engine.core",
        "EngineCore.reset_prefix_cache",
        ("reset_running_requests", "reset_connector"),
        why="only the engine core knows when the KV cache has been emptied; a worker that took new "
        "KV scales must not run while cached codes of the old ones can still be read",
        until=_CACHE_UNTIL,
        replacement=reset_and_tell,
    ),
    Patch(
        "vllm.v1.engine.core",
        "EngineCore.collective_rpc",
        ("method",),
        why="KV scales or weights sent by collective_rpc would change under requests in flight, "
        "which only the engine core knows",
        until=_CACHE_UNTIL,
        replacement=rpc_unless_busy,
    ),
)
LOADS = (
    Patch(
        "vllm.model_executor.models.utils",
        "AutoWeightsLoader.load_weights",
        ("weights",),
        why="TRL, verl, prime-rl and others call model.load_weights and nothing else; NaN and "
        "infinity must not become codes, a load that breaks off must not serve half-updated "
        "weights, and only around the whole call can one know that it broke off",
        until="vLLM calls a quantization config before and after a load",
        replacement=check_plain_loads,
    ),
)
RELOADS = tuple(
    Patch(
        module,
        "GPUModelRunner.reload_weights",
        ("weights_iterator", "weights_path", "is_checkpoint_format"),
        why="vLLM's layerwise reload replaces the parameters that captured graphs read, serves an "
        "incomplete checkpoint, and copies tensors in kernel format unseen",
        until="vLLM reloads in place where a quantization method asks for it",
        replacement=reload_in_place,
    )
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
)
"""The runner of a CPU inherits from the first."""
LAYERWISE = tuple(
    Patch(
        "vllm.model_executor.model_loader.reload.layerwise",
        target,
        parameters,
        why="prime-rl and SkyRL call model.load_weights between the two functions of vLLM's "
        "layerwise reload, which puts the parameters on the meta device and wraps their loaders; "
        "loaders that quantize cannot run there, and what has broken off cannot be mended",
        until="vLLM reloads in place where a quantization method asks for it",
        replacement=replacement,
    )
    for target, parameters, replacement in (
        ("initialize_layerwise_reload", ("model",), begin_layerwise),
        ("finalize_layerwise_reload", (), finish_layerwise),
    )
)

_GATE_WHY = (
    "a worker that raises ends a multiprocess engine and leaves requests behind in an in-process "
    "one, so requests must be refused before any worker hears of them"
)
GATES = tuple(
    Patch(
        module,
        target,
        (),
        _GATE_WHY,
        "vLLM's engines have a switch that refuses requests with an error",
        ask_before_first if target.endswith("add_request") else None,
    )
    for module, target in (
        ("vllm.v1.engine.llm_engine", "LLMEngine.add_request"),
        ("vllm.v1.engine.async_llm", "AsyncLLM.generate"),
        ("vllm.v1.engine.async_llm", "AsyncLLM.encode"),
        ("vllm.v1.engine.async_llm", "AsyncLLM.add_request"),
    )
)
"""Installed where an engine's configuration is made, if its class is imported there, and compared
where a request gate is made."""

PACKING = (
    Patch(
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.process_weights_after_loading",
        ("layer",),
        why="on a CPU vLLM packs the weights of routers and of gates of shared experts, which most "
        "model classes build without a quantization config, and drops them: no refit reaches them",
        until="vLLM passes the quantization config to every linear layer",
        replacement=keep_unpacked,
    ),
    Patch(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        ("layer",),
        why="on a CPU vLLM multiplies with a packed copy of an output projection; Gemma and Cohere "
        "build their embedding, which is also that, without a quantization config",
        until="vLLM passes the quantization config to every embedding",
        replacement=keep_unpacked,
    ),
)
WORKER = (*LOADS, *RELOADS, *LAYERWISE, *PACKING)
"""Installed where a model is built."""
LEDGER: tuple[Patch, ...] = (*ENGINE_CORE, *WORKER, *GATES)


def install(patches: Iterable[Patch]) -> None:
    """Apply patches to the modules that this process has imported; check all before the first.

    Records without a replacement are only checked.
    """
    loaded = [patch for patch in patches if patch.module in sys.modules]
    for patch, (owner, name, function) in [(patch, patch.check()) for patch in loaded]:
        if patch.replacement is None or hasattr(function, _MARK):
            continue
        replaced = functools.wraps(function)(patch.replacement(function))
        setattr(replaced, _MARK, True)
        setattr(owner, name, replaced)
        if isinstance(owner, ModuleType):
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is function:
                    setattr(module, name, replaced)
