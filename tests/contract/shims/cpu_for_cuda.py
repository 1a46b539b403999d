"""Lets NeMo RL's policy and vLLM workers run where there is no GPU: for test_drivers.py alone.

Ray runs :func:`setup` at the start of every worker process. As the modules of NeMo RL below are
imported, it replaces the few things in them that only CUDA can do: the device is the CPU, with
counters of memory that stand at 0; CUDA IPC handles are files that two processes map, with no copy
in between; NVML has a UUID for each rank and so little memory that a refit goes in several groups;
vLLM's workers take shares of Ray's GPUs, and its sleep mode is a no-op.

For the Megatron worker :class:`megatron_fp8rl.testing.cpu_shim.CpuShim` is switched on too, nothing
is moved off a GPU, and ``megatron_shims`` beside this folder stands for Transformer Engine.

All else is real: Ray, its actors and placement groups, the driver and its loop, the ZMQ protocol
and the packing of a refit, vLLM's engine, executor and CPU kernels, FSDP, the optimizer, the loss,
and all of fp8rl.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch.overrides import TorchFunctionMode

FOLDER = "CPU_FOR_CUDA_FOLDER"
"""Environment variable: where the files that stand for device memory are made."""
FREE_BYTES = 40 << 20
"""What NVML reports; NeMo RL sizes the buffers of a refit by it."""
DEVICE_UUID = "GPU-00000000-0000-0000-0000-00000000000{}"
NO_OPS = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device")
ZEROS = (
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "current_device",
)


class CudaMeansCpu(TorchFunctionMode):
    """While it is entered, what torch is asked to put on CUDA it puts on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:  # Megatron's optimizers ask for it
            return "torch.cuda." + func(*args).rpartition(".")[2]
        if name == "_parse_to":  # of `Module.to`, to which Automodel gives a GPU's number
            args = tuple("cpu" if type(arg) is int else arg for arg in args)
        if isinstance((kwargs or {}).get("device"), int):
            kwargs = {**kwargs, "device": "cpu"}
        named = {name: self._on_cpu(value) for name, value in (kwargs or {}).items()}
        if named.get("pin_memory"):
            del named["pin_memory"]
        return func(*map(self._on_cpu, args), **named)

    @staticmethod
    def _on_cpu(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("cuda"):
            return "cpu"
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return value


class EveryThread(threading.local):
    """Enters :class:`CudaMeansCpu` for good, once in each thread: modes belong to a thread."""

    entered = False

    def enter(self, *_: Any) -> None:
        if not self.entered:
            self.entered = True
            CudaMeansCpu().__enter__()


class SharedBuffers:
    """Files in the place of CUDA IPC handles: ``((path, bytes),)``, one for each buffer address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, Path] = {}

    def handle(self, buffer: torch.Tensor) -> tuple[tuple[str, int]]:
        """Copy a uint8 buffer ``[bytes]`` into its file; as ``get_handle_from_tensor``."""
        name = f"buffer-{os.getpid()}-{len(self._files)}"
        file = self._files.setdefault(buffer.data_ptr(), self._folder / name)
        if not file.exists() or file.stat().st_size != buffer.numel():
            with file.open("wb") as made:
                made.truncate(buffer.numel())
        self._map(str(file), buffer.numel()).copy_(buffer)
        return ((str(file), buffer.numel()),)

    def rebuild(self, handle: tuple[tuple[str, int]], device_id: int) -> torch.Tensor:
        """The buffer behind a handle, in this process; as ``rebuild_cuda_tensor_from_ipc``."""
        return self._map(*handle[0])

    @staticmethod
    def _map(path: str, size: int) -> torch.Tensor:
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class Stream:
    """A CUDA stream on which all is done as soon as it is asked for."""

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class CpuForCuda:
    """The replacements of one process; each method takes the module that was imported."""

    def __init__(self, folder: Path) -> None:
        self._buffers = SharedBuffers(folder)
        self._threads = EveryThread()

    def install(self) -> None:
        waiting: dict[str, Callable[[Any], None]] = {
            "nemo_rl.utils.nvml": self.nvml,
            "nemo_rl.models.policy.utils": self.handles,
            "nemo_rl.models.policy.workers.dtensor_policy_worker": self.trainer,
            "nemo_rl.models.policy.workers.dtensor_policy_worker_v2": self.trainer,
            "nemo_rl.models.policy.workers.megatron_policy_worker": self.megatron,
            "nemo_rl.models.megatron.setup": self.megatron_setup,
            "nemo_rl.models.generation.vllm.vllm_worker": self.rollouts,
            "nemo_rl.models.generation.vllm.vllm_backend": self.engine,
            "vllm.platforms.cpu": self.platform,
            "vllm.distributed.device_communicators.cpu_communicator": self.communicator,
        }
        for name, replace in waiting.items():
            wrapt.register_post_import_hook(replace, name)

    def nvml(self, module: Any) -> None:
        def uuid(device_idx: int) -> str:
            ready = torch.distributed.is_initialized()
            return DEVICE_UUID.format(torch.distributed.get_rank() if ready else 0)

        module.get_device_uuid = uuid
        module.get_free_memory_bytes = lambda device_idx: float(FREE_BYTES)

    def handles(self, module: Any) -> None:
        module.get_handle_from_tensor = self._buffers.handle
        module.rebuild_cuda_tensor_from_ipc = self._buffers.rebuild

    def trainer(self, module: ModuleType) -> None:
        from nemo_rl.distributed import numa_utils

        self._torch_cuda()
        distributed: Any = torch.distributed
        make_group, make_mesh = distributed.init_process_group, distributed.init_device_mesh
        autocast: Any = torch.autocast

        def gloo(backend: Any = None, **options: Any) -> Any:
            return make_group("gloo", **options)

        def cpu_mesh(device_type: str, *args: Any, **options: Any) -> Any:
            return make_mesh("cpu", *args, **options)

        distributed.init_process_group = gloo
        distributed.device_mesh.init_device_mesh = cpu_mesh
        torch.autocast = lambda device_type, **options: autocast("cpu", **options)  # type: ignore[assignment,misc]
        # The worker binds its process first of all, and every public method opens an NVTX range:
        # between them the places that each of its threads passes before it touches a tensor.
        numa_utils.bind_to_gpu_numa = self._threads.enter
        nvtx: Any = torch.cuda.nvtx
        nvtx.range_push = self._threads.enter
        nvtx.range_pop = lambda: None

    def megatron(self, module: ModuleType) -> None:
        from megatron.core.distributed import param_and_grad_buffer

        from megatron_fp8rl.testing.cpu_shim import CpuShim

        # They would free what they have "copied to the CPU".
        buffer = param_and_grad_buffer._ParamAndGradBuffer
        buffer.offload_to_cpu = buffer.reload_from_cpu = lambda *_, **__: None
        region = ExitStack()
        region.enter_context(CpuShim().active())
        atexit.register(region.close)  # else it would end with the last reference
        self.trainer(module)
        torch.cuda.device_count = lambda: 1

    def megatron_setup(self, module: Any) -> None:
        initialize = module.initialize_megatron

        def with_cuda(**options: Any) -> Any:
            options["cfg"].dist.distributed_backend = "gloo"  # else it asks for GPUs
            return initialize(allow_no_cuda=True, **options)

        module.initialize_megatron = with_cuda

    def rollouts(self, module: ModuleType) -> None:
        import vllm.device_allocator as allocator

        self._torch_cuda()
        allocator.is_sleep_mode_available = lambda *_: True

    def platform(self, module: Any) -> None:
        module.CpuPlatform.ray_device_key = "GPU"
        module.CpuPlatform.is_sleep_mode_available = lambda platform: True

    def communicator(self, module: Any) -> None:
        # Its shared memory outlives workers that are killed, and stops the next that have the port.
        module.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda group: False

    def engine(self, module: Any) -> None:
        # It waits for a stream, for which vLLM on a CPU has a placeholder without that method.
        extension = module.VllmInternalWorkerExtension
        extension._synchronize_before_ipc_data_ack = lambda worker: None

    @staticmethod
    def _torch_cuda() -> None:
        cuda: Any = torch.cuda
        for name in NO_OPS:
            setattr(cuda, name, lambda *_, **__: None)
        for name in ZEROS:
            setattr(cuda, name, lambda *_: 0)
        cuda.is_available = lambda: False
        cuda.mem_get_info = lambda *_: (8 << 30, 16 << 30)
        cuda.get_device_name = lambda *_: "cpu"
        cuda.get_device_capability = lambda *_: (9, 0)
        cuda.current_stream = lambda *_: Stream()


def setup() -> None:
    """Called by Ray in each worker process before any module of NeMo RL is imported."""
    CpuForCuda(Path(os.environ[FOLDER])).install()
