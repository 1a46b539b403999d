"""The whole plugin contract: every hook that a package may implement.

A package registers a module or an object under the entry-point group ``fp8rl`` and marks its
functions with ``fp8rl.hookimpl``. A hook may be implemented by many plugins and may leave out
arguments that it does not need. A module with hooks must not import an engine at import time.

What a hook is given is there to be read: it is a tuple, a copy or a frozen object, so that no
plugin takes anything away from the user's recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from fp8rl.gemm import GemmBackend
    from fp8rl.plugins.adapters import EngineAdapter
    from fp8rl.recipe import Pins

PROJECT = "fp8rl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class RefitReport:
    """Outcome of a complete refit, one weight transfer; an incomplete refit raises instead."""

    parameters: int
    """Engine parameters that received their tensors."""
    kv_scales: int
    """KV scales that were set."""
    tensors: int
    """Tensors on the wire."""
    received_bytes: int
    """Bytes on the wire."""
    seconds: float
    """Duration of the refit."""
    scale_epoch: int = 0
    """Number of the engine's KV scales: larger than after the last refit if a scale has changed."""
    left_out: int = 0
    """Tensors among these that the engine has no place for: those of a vision tower that it was
    started without, and of layers that its model class never loads."""


@hookspec
def register_pins(module_names: Sequence[str]) -> Pins | None:
    """Return pins to add to the recipe's, for a model with these global HF module names."""


@hookspec
def register_gemm_backends() -> Sequence[GemmBackend]:
    """Return GEMM backends to offer beside the built-in ones; their names must be unique.

    They are asked before the built-in ones (:mod:`fp8rl.gemm.table`), and ``gemm_backend`` of
    ``megatron_fp8rl.convert`` can name one for every product. A backend may have the products of
    :class:`fp8rl.gemm.GroupedBackend` too.
    """


@hookspec
def register_is_correctors() -> Mapping[str, Callable]:
    """Return importance-sampling correctors by their ``importance_sampling.corrector`` names."""


@hookspec
def register_engine_adapters() -> Sequence[EngineAdapter]:
    """Return the engines that the package serves, each a subcommand of ``fp8rl doctor``.

    It is called at the start of every command, so it must not import the engine.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to the ``fp8rl`` command line."""


@hookspec
def refit_finished(report: RefitReport) -> None:
    """Called once after every complete refit of a rollout engine."""


@hookspec
def step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """Called once after every training step, counted from 0, with its mismatch and loss metrics.

    The demo calls it, and NeMo RL's loops with our keys where they log a step.
    """
