"""Run a Python script in several processes of one world, and never hang on it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fp8rl.errors import Fp8RLError

RENDEZVOUS = "FP8RL_TEST_RENDEZVOUS"
_POLL_SECONDS = 0.05
_TAIL = 6000


class LaunchError(Fp8RLError, RuntimeError):
    """A process of the world died or ran out of time; the message ends with its stderr."""


def launch(
    script: str | os.PathLike[str],
    world_size: int,
    args: Sequence[str] = (),
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``python script args...`` as ranks 0 to ``world_size - 1`` and wait for all.

    The script joins the world with :func:`join`. A file takes the place of a port for the
    rendezvous, so that runs beside each other cannot collide.

    Args:
        timeout: seconds until every process is killed.

    Raises:
        LaunchError: a process ended with an error or did not end; the others have been killed.
    """
    with tempfile.TemporaryDirectory(prefix="fp8rl-launch-") as folder:
        base = Path(folder)
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
            "WORLD_SIZE": str(world_size),
            RENDEZVOUS: str(base / "store"),
        }
        if Path("/sys/class/net/lo").exists():
            shared.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(world_size):
                with (base / f"{rank}.out").open("w") as out, (base / f"{rank}.err").open("w") as e:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, os.fspath(script), *args],
                            stdout=out,
                            stderr=e,
                            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        )
                    )
            _wait(processes, base, timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [(base / f"{rank}.out").read_text() for rank in range(world_size)]


def join(device: str = "cpu") -> tuple[int, int]:
    """Join the world of :func:`launch`; returns rank and world size.

    Args:
        device: "cpu" for gloo, "cuda" for NCCL with one GPU a process.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "gloo" if device == "cpu" else "nccl"
    store = torch.distributed.FileStore(os.environ[RENDEZVOUS], world_size)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return rank, world_size


def _wait(processes: Sequence[subprocess.Popen], base: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            tails = "\n".join(f"rank {r} ({codes[r]}): {_tail(base, r)}" for r in failed)
            raise LaunchError(f"{len(failed)} of {len(codes)} processes failed:\n{tails}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            rank = codes.index(None)
            raise LaunchError(
                f"Rank {rank} did not end within {timeout:g} s; its stderr:\n{_tail(base, rank)}"
            )
        time.sleep(_POLL_SECONDS)


def _tail(base: Path, rank: int) -> str:
    return (base / f"{rank}.err").read_text(errors="replace")[-_TAIL:]
