"""``ClippedPGLossFn``: with ``loss_fn.fp8rl`` it is made as our subclass.

Why: the drivers name the class themselves; there is no key for another one.
How: ``__new__`` of the class itself, so that it does not matter who has imported the class
already. A loss without our key is upstream's own class, untouched.
Upstream: ``nemo_rl/algorithms/loss/loss_functions.py``.
Until: the drivers take a loss by name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from nemo_rl_ext.config.drivers import PLAN
from nemo_rl_ext.driver.run_state import RunState
from nemo_rl_ext.patch_finder import PatchFinder, install
from nemo_rl_ext.patches.upstream import Upstream, resolve

_MODULE = "nemo_rl.algorithms.loss.loss_functions"
UPSTREAM = (
    Upstream(_MODULE, "ClippedPGLossFn.__init__", "self, cfg"),
    Upstream(
        _MODULE,
        "ClippedPGLossFn.__call__",
        "self, next_token_logprobs, data, global_valid_seqs, global_valid_toks",
    ),
)


def run_of_process() -> RunState:
    """Return what this process knows of the run; its patches are installed where they are not yet.

    A loss that arrives in the single controller's actor, or in a worker, asks for it.
    """
    return install().run


def apply(module: ModuleType, finder: PatchFinder) -> None:
    for upstream in UPSTREAM:
        resolve(module, upstream)
    base = module.ClippedPGLossFn

    def __new__(cls: type, cfg: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is base and getattr(cfg, PLAN, None) is not None:
            from nemo_rl_ext.driver.loss import CorrectedPGLossFn

            made = object.__new__(CorrectedPGLossFn)
            made.run_of_process = run_of_process
            return made
        return object.__new__(cls)

    base.__new__ = __new__
