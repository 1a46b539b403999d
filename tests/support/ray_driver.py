"""A Ray of its own for NeMo RL's drivers, and the environment in which they run on a CPU."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from support.sources import ROOT, source

SUMS = 20
"""The first of the benchmark's sums: few enough that seconds of training get some of them right."""
MODEL = f"""
import json, pathlib
from tiny_models import make_model, problems
sums = problems()[:{SUMS}]
make_model(pathlib.Path("model"), steps=40, batch_size=16, sums=sums)
rows = (json.dumps({{"input": p.prompt, "output": p.answer}}) for p in sums)
pathlib.Path("few.jsonl").write_text("\\n".join(rows) + "\\n", encoding="utf-8")
"""
LIMIT_S = 600
"""A run takes two to three minutes on two idle cores, and can take over five on busy ones."""
WORKER = "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker"
AUTOMODEL = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2"


def digest(root: Path) -> str:
    """Of the driver and all of NeMo RL's Python."""
    files = [root / "examples" / "run_grpo.py", *sorted((root / "nemo_rl").rglob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def environment(
    folder: Path, interpreter: Path, *more: str, megatron: bool = False
) -> dict[str, str]:
    """Variables of the driver, of Ray and all workers; makes what they name in ``folder``.

    Args:
        more: further folders of modules.
    """
    ours = metadata.distribution("fp8rl")
    site = folder / "site" / f"fp8rl-{ours.version}.dist-info"
    site.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):  # this checkout counts as installed
        (site / name).write_text(ours.read_text(name) or "", encoding="utf-8")
    for worker in (WORKER, AUTOMODEL):
        stand_in = folder / "venvs" / worker / "bin" / "python"
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n', encoding="utf-8")
        stand_in.chmod(0o755)
    (folder / "buffers").mkdir()
    extra = os.environ.get("NEMO_RL_PYTHON_SITE")
    path = [
        str(site.parent),
        str(ROOT / "tests" / "contract" / "shims"),
        str(source("NEMO_RL_SRC")),
        *([extra] if extra else []),
        str(ROOT),
        str(ROOT / "plugins"),
        *more,
    ]
    if megatron:
        path = [
            str(ROOT / "tests" / "contract" / "megatron_shims"),
            str(source("MEGATRON_BRIDGE_SRC") / "src"),
            str(source("MEGATRON_LM_SRC")),
            *path,
        ]
    named = {"TORCH_CUDA_ARCH_LIST": "9.0"} if megatron else {}  # upstream asks for it
    return {
        **named,
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": os.pathsep.join([str(interpreter.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "NEMO_RL_VENV_DIR": str(folder / "venvs"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_prestart_worker_first_driver": "0",  # a process for each of the CPUs told below
        # Ray's own name for the hook of `runtime_env`, which the driver fills in itself.
        "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "cpu_for_cuda.setup",
        "CPU_FOR_CUDA_FOLDER": str(folder / "buffers"),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(head: subprocess.Popen[bytes]) -> None:
    """End a Ray: with ``--block`` its head ends what it started."""
    head.terminate()
    try:
        head.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()


def started(head: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until Ray runs; False where it has given up."""
    while head.poll() is None:
        if "Ray runtime started" in log.read_text(encoding="utf-8"):
            return True
        time.sleep(0.5)
    return False


@contextmanager
def ray_cluster(interpreter: Path, env: dict[str, str], gpus: int) -> Iterator[str]:
    """The address of a Ray of this test alone, whose processes end with the block."""
    # Short, because Ray's sockets lie below it and their names are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as temporary:
        log = Path(temporary) / "start.log"
        for _ in range(2):  # Ray gives its own processes 30 s, too few on a busy machine
            port = free_port()
            command = [
                *(str(interpreter), "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                "--include-dashboard=false",
                "--disable-usage-stats",
                "--node-ip-address=127.0.0.1",
                f"--port={port}",
                f"--temp-dir={temporary}",
                "--min-worker-port=0",  # any that is free: there may be another Ray here
                "--max-worker-port=0",
                f"--num-gpus={gpus}",
                "--num-cpus=8",
                "--object-store-memory=500000000",
            ]
            with log.open("w", encoding="utf-8") as file:
                head = subprocess.Popen(
                    command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            try:
                if started(head, log):
                    yield f"127.0.0.1:{port}"
                    return
            finally:
                stop(head)
        raise AssertionError(f"Ray did not start: {log.read_text(encoding='utf-8')[-3000:]}")
