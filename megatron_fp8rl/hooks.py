"""Hooks of megatron_fp8rl in fp8rl's plugin contract."""

from __future__ import annotations

from fp8rl import PluginManager, hookimpl
from fp8rl.plugins.adapters import Compared, Diagnosis, EngineAdapter, ExactRequest, version_of
from megatron_fp8rl.compat import SUPPORTED_VERSIONS, installed_version, lacks_triton


@hookimpl
def register_engine_adapters() -> list[EngineAdapter]:
    """Offer the adapter of Megatron-Core, which does not import it."""
    return [EngineAdapter("megatron", diagnose, replay_exact=_replay_exact)]


def _replay_exact(request: ExactRequest) -> list[Compared]:
    from megatron_fp8rl.testing.exact_replay import replay

    return replay(request)


def diagnose() -> Diagnosis:
    """Describe Megatron-Core on this machine for ``fp8rl doctor``."""
    # Not at the top: other commands of the command line do without torch.
    import torch

    from fp8rl.gemm.table import survey

    found, transformer_engine = installed_version(), version_of("transformer-engine")
    problems = []
    if found is None:
        problems.append(
            f"megatron-core is not installed; install megatron-core {SUPPORTED_VERSIONS[0]}, "
            "einops and packaging."
        )
    elif found.partition("+")[0] not in SUPPORTED_VERSIONS:
        problems.append(
            f"megatron-core {found} is untested; install megatron-core "
            f"{' or '.join(SUPPORTED_VERSIONS)}."
        )
    if found is not None and lacks_triton(found):
        problems.append(
            f"Triton is missing, without which megatron-core {found} cannot be imported; install "
            "triton (pip install triton), of the version that this torch asks for."
        )
    if not torch.distributed.is_available():
        problems.append("This torch has no torch.distributed; install a build that has.")
    facts = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformer-engine": transformer_engine or "not installed (not needed)",
        "megatron-bridge": version_of("megatron-bridge") or "not installed (not needed)",
        "FP8 linears": f"local layers, {'' if transformer_engine else 'not '}TransformerEngine's; "
        "dense, experts, multi-token prediction",
        **survey(PluginManager(strict=False).gemm_backends()),
    }
    return Diagnosis(found, SUPPORTED_VERSIONS, facts, tuple(problems))
