"""Compile DeepGEMM's kernels while a model loads, so that its first steps find them ready.

:class:`KernelWarmup` is the whole interface of this folder. ``job`` says what is compiled and where
it is kept, ``lister`` asks DeepGEMM which kernels a weight needs, ``program`` is the process that
compiles them. Up to 0.29 vLLM compiles ahead for its own
``Fp8LinearMethod`` only. From 0.30 on it also does so for layers that name a provider
(:func:`vllm_fp8rl.compat.warms_up_providers`), and nothing here is used: this folder can go with
0.29.
"""

from vllm_fp8rl.deep_gemm_warmup.warmup import KernelWarmup

__all__ = ["KernelWarmup"]
