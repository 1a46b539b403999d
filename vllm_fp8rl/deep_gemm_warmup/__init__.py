"""Compile DeepGEMM's kernels while a model loads, so that its first steps find them ready.

:class:`KernelWarmup` is the whole interface of this folder. ``job`` says what is compiled and where
it is kept, ``lister`` asks DeepGEMM which kernels a weight needs, ``program`` is the process that
compiles them. vLLM 0.25.1, the only release that is served on GPUs
(:data:`vllm_fp8rl.compat.GPU_TESTED`), compiles ahead for its own ``Fp8LinearMethod`` only. From
0.30 on it also does so for layers that name a provider (``deep_gemm_warmup_provider``); that may
replace the warm-up of linear layers once such a release has been tested on a GPU.
"""

from vllm_fp8rl.deep_gemm_warmup.warmup import KernelWarmup

__all__ = ["KernelWarmup"]
