"""Compile DeepGEMM's kernels while a model loads, so that its first steps find them ready.

:class:`KernelWarmup` is the whole interface of this folder. ``job`` says what is compiled and where
it is kept, ``lister`` asks DeepGEMM which kernels a weight needs, ``program`` is the process that
compiles them. It serves vLLM releases that do not warm up these layers themselves, see
:func:`vllm_fp8rl.compat.warms_up_deep_gemm`.
"""

from vllm_fp8rl.deep_gemm_warmup.warmup import KernelWarmup

__all__ = ["KernelWarmup"]
