"""Run megatron-core where there is no CUDA: for the demo and the tests alone.

megatron-core 0.16.1 takes ``torch.cuda.current_device()`` for *the* device, keeps its RNG streams
in CUDA generators, and spells ``device="cuda"`` in masks, schedules and optimizers.
:class:`CpuShim` maps all of that to the CPU while, and only while, one of its regions is open::

    shim = CpuShim()
    with shim.active():                       # around every call into megatron-core
        init_gloo()
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(1234)
        config = TransformerConfig(..., **CPU_CONFIG)
        ...

Leaving the region restores everything, so another engine of the same process (vLLM stubs parts of
``torch.cuda`` itself) sees torch as it left it. Regions may nest; entering one costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.testing.local_spec import Patch, apply, local_spec_patches

CPU_CONFIG: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "cross_entropy_loss_fusion": False,
}
"""``TransformerConfig`` fields for a CPU: no CUDA kernels, and nothing that calls torch.compile."""

_CPU = torch.device("cpu")


class CpuShim:
    """The patches, and the one way to switch them on."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            raise UnsupportedError(
                "CpuShim is for machines without CUDA, and this one has it; run megatron-core "
                "as it is."
            )
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """A region in which megatron-core runs on the CPU; nested regions are free.

        The CPU generator stands in for CUDA's, so inside the region ``torch.cuda.manual_seed``
        and megatron's RNG tracker move the *CPU* stream.
        """
        with ExitStack() as stack:
            if self._depth == 0:
                apply(stack, _patches())
                stack.enter_context(_CudaMeansCpu())
            self._depth += 1
            stack.callback(self._leave)
            yield

    def _leave(self) -> None:
        self._depth -= 1


def init_gloo() -> None:
    """Make a process group over gloo of this process alone, unless the process has one already.

    Raises:
        UnsupportedError: the existing group has more processes.
    """
    dist = torch.distributed
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif dist.get_world_size() != 1:
        raise UnsupportedError(
            f"torch.distributed already has {dist.get_world_size()} process(es), not 1; destroy "
            "that group first."
        )


def _patches() -> list[Patch]:
    import megatron.core.fusions.fused_softmax as fused_softmax
    import megatron.core.tensor_parallel.random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def get_rng(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "get_rng_state", get_rng),
        (cuda, "set_rng_state", set_rng),
        (cuda, "manual_seed", seed),
        (cuda, "synchronize", nothing),
        (cuda, "empty_cache", nothing),
        (cuda, "reset_peak_memory_stats", nothing),
        # The dispatcher of MoE layers counts tokens on a stream of its own.
        (cuda, "Stream", _Stream),
        (cuda, "current_stream", lambda *args: _THE_STREAM),
        (cuda, "stream", nullcontext),
        (mcore_random, "_get_cuda_rng_state", get_rng),
        (mcore_random, "_set_cuda_rng_state", set_rng),
        # A mode is off inside autograd.backward, where recomputed attention makes its mask.
        # Splits that are on the CPU already would stay tensors, which all_to_all does not take.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_cpu),
        (fused_softmax, "get_default_causal_mask", _causal_mask),
        *local_spec_patches(),
    ]


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _causal_mask(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)


class _Stream:
    """All work of a CPU is in order already."""

    def wait_stream(self, other: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, stream: _Stream) -> None:
        pass


_THE_STREAM = _Stream()


class _CudaMeansCpu(TorchFunctionMode):
    """Reads a literal CUDA device as the CPU, and names CPU tensor types as CUDA's.

    megatron's optimizers sort parameters by ``param.type() == "torch.cuda.BFloat16Tensor"``.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"
