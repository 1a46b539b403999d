"""Hooks of torch_fp8rl in fp8rl's plugin contract."""

from __future__ import annotations

from fp8rl import PluginManager, hookimpl
from fp8rl.plugins.adapters import Diagnosis, EngineAdapter, version_of

TESTED = ("2.13.0",)
"""Releases of torch that ran the tests of this package."""


@hookimpl
def register_engine_adapters() -> list[EngineAdapter]:
    """Offer the adapter of plain torch, which does not import it."""
    return [EngineAdapter("torch", diagnose)]


def diagnose() -> Diagnosis:
    """Describe torch and transformers on this machine for ``fp8rl doctor``."""
    # Not at the top: other commands of the command line do without torch.
    import torch

    from fp8rl.gemm.table import survey
    from torch_fp8rl.modules import SERVED

    found, transformers = torch.__version__, version_of("transformers")
    problems = []
    if not torch.distributed.is_available():
        problems.append("This torch has no torch.distributed; install a build that has.")
    facts = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "transformers": transformers or "not installed (builds the models)",
        "families": ", ".join(family.name for family in SERVED),
        "doors": "convert(model, recipe)",
        **survey(PluginManager(strict=False).gemm_backends()),
    }
    return Diagnosis(found, TESTED, facts, tuple(problems))
