"""The whole plugin contract: every hook a package may implement.

A package registers a module or object under the entry-point group ``fp8rl`` and marks its functions
with ``fp8rl.hookimpl``. Hook modules must not import an engine at import time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from fp8rl.adapters import EngineAdapter
    from fp8rl.gemm import GemmBackend
    from fp8rl.recipe import Pins
    from fp8rl.refit import RefitReport

PROJECT = "fp8rl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_pins(module_names: Sequence[str]) -> Pins | None:
    """Pins to add to the recipe's, for a model with these global HF module names."""


@hookspec
def register_gemm_backends() -> Sequence[GemmBackend]:
    """GEMM backends to offer beside the built-in ones; names must be unique.

    They are asked before the built-in ones (:mod:`fp8rl.gemm.table`), and ``gemm_backend`` of
    ``megatron_fp8rl.convert`` can name one for every product. A backend may have the products of
    :class:`fp8rl.gemm.GroupedBackend` too. :func:`fp8rl.testing.gemm.product_error` compares its
    products with float64.
    """


@hookspec
def register_is_correctors() -> Mapping[str, Callable]:
    """Importance-sampling correctors by the name used in ``importance_sampling.corrector``."""


@hookspec
def register_engine_adapters() -> Sequence[EngineAdapter]:
    """Engines this package serves, for ``fp8rl doctor``."""


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to the ``fp8rl`` command line."""


@hookspec
def refit_finished(report: RefitReport) -> None:
    """Called once after every complete refit of a rollout engine."""


@hookspec
def step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """Called once after every training step with its mismatch and loss metrics."""
