"""Compile DeepGEMM's kernels while a model loads, so that its first steps find them ready.

:class:`KernelWarmup` is the whole interface of this folder. ``shapes`` says what is compiled and
where it is kept, ``kernel_lists`` asks DeepGEMM which kernels a weight needs, ``compile_kernels``
is the process that compiles them.

vLLM has a warm-up of its own (from 0.30 on for every layer with a ``deep_gemm_warmup_provider``),
but it compiles one kernel after the other, and the first graphs are captured before it: an engine
of Qwen3-8B's shape took 291 s to start with 0.32 on an H200. This folder can go when vLLM compiles
in parallel.
"""

from vllm_fp8rl.warmup.kernel_warmup import KernelWarmup

__all__ = ["KernelWarmup"]
