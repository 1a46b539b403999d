"""Several runs of ``nemo_rl.py`` at once on one machine, each with a Ray of its own.

    python benchmarks/nemo_rl_side_by_side.py --folder OUT --runs bf16:1,fp8rl:1 [--apart 7]
        -- --source NEMO_RL --trainer megatron --task long --model MODEL --limit 1500 ...

``bf16:1`` is ``--variants bf16 --seed 1``; what follows ``--`` is for all runs. Each gets Linux
namespaces of its own, for which this must be root: NeMo RL's drivers meet on fixed ports, in
``/tmp`` and in ``/dev/shm`` otherwise (``docs/nemo_rl_install.md``). A run sees a ``/tmp`` of its
own, so no path may lie there. With the first process of such a namespace all
others end, and with this program all runs, unless it is ended by SIGKILL. Runs start ``--apart``
seconds one after the other. What a run prints is in ``OUT/VARIANT-SEED.json``, what it logs in
``OUT/VARIANT-SEED.log``, and the driver's files in ``OUT/VARIANT-SEED/``.

Where runs share a GPU, start CUDA MPS before them (``nvidia-cuda-mps-control -d``) with
``CUDA_MPS_PIPE_DIRECTORY`` set to a folder for both: of seven processes on an H200 each then
replays 1,650 graphs of 90 small kernels a second, and 403 in time slices.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
SHARED_MEMORY = "8g"
"""Of ``/dev/shm``: Ray's objects, and what vLLM and torch exchange."""
OBJECTS = 2 << 30
"""Bytes of Ray's object store."""
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def isolate(folder: Path) -> None:
    """Give the namespaces of this process a ``/tmp``, a ``/dev/shm`` and a loopback of their own.

    Args:
        folder: becomes ``/tmp``.
    """
    subprocess.run(["mount", "--bind", str(folder), "/tmp"], check=True)
    size = f"size={SHARED_MEMORY}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", "/dev/shm"], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(device, _SIOCSIFFLAGS, request)


def start_ray(gpus: int) -> None:
    """Start a Ray in this namespace, to which the driver will connect."""
    # Not the script `ray`, which a folder of packages does not have on the PATH.
    program = "from ray.scripts.scripts import main; main()"
    command = [sys.executable, "-c", program, "start", "--head", "--node-ip-address=127.0.0.1"]
    command += [f"--num-gpus={gpus}", f"--object-store-memory={OBJECTS}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    subprocess.run(command, check=True)
    os.environ["RAY_ADDRESS"] = "127.0.0.1:6379"


def run_inside(options: argparse.Namespace) -> int:
    """Run one driver in the namespaces of this process, and return its exit code."""
    variant, _, seed = options.runs[0].partition(":")
    here = options.folder / f"{variant}-{seed}"
    private = here / "tmp"
    private.mkdir(parents=True, exist_ok=True)
    isolate(private)
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(here / "converted")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    start_ray(options.gpus)
    command = [sys.executable, str(HERE.with_name("nemo_rl.py")), *options.arguments]
    command += ["--folder", str(here), "--variants", variant, "--seed", seed]
    with here.with_suffix(".json").open("a", encoding="utf-8") as out:
        return subprocess.run(command, stdout=out, check=False).returncode


def run_all(options: argparse.Namespace) -> int:
    """Start all runs and wait for them; return how many failed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    began, running, failed = time.monotonic(), {}, 0
    try:
        for name in options.runs:
            if running:
                time.sleep(options.apart)
            file = options.folder / f"{name.replace(':', '-')}.log"
            command = [*UNSHARE, sys.executable, str(HERE), "--inside", "--runs", name]
            command += ["--folder", str(options.folder), "--", *options.arguments]
            with file.open("a", encoding="utf-8") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                failed += code != 0
                sys.stderr.write(f"{time.monotonic() - began:6.0f} s: {name} ended with {code}\n")
            time.sleep(0.2)
    finally:  # also where this is interrupted
        for process in running.values():
            process.kill()  # with --kill-child all that the run has started
            process.wait()
    return failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs of nemo_rl.py at once on one machine")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", required=True, help="VARIANT:SEED,...")
    parser.add_argument("--apart", type=float, default=7.0, help="seconds")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and those of nemo_rl.py")
    options = parser.parse_args()
    options.runs = options.runs.split(",")
    for name in options.runs:
        variant, _, seed = name.partition(":")
        if not variant or not seed.isdecimal():
            parser.error(f"--runs has '{name}'; give VARIANT:SEED, such as fp8rl:1")
    if len(set(options.runs)) < len(options.runs):
        parser.error("--runs has a run twice")
    options.folder = options.folder.resolve()
    if not options.inside and options.folder.is_relative_to("/tmp"):
        parser.error(f"--folder {options.folder} is in /tmp, of which each run has its own")
    if options.arguments[:1] == ["--"]:
        del options.arguments[0]
    of_driver = argparse.ArgumentParser(add_help=False)
    of_driver.add_argument("--gpus", type=int, default=1)
    options.gpus = of_driver.parse_known_args(options.arguments)[0].gpus
    return options


def main() -> int:
    options = parse()
    if options.inside:
        return run_inside(options)
    if os.geteuid():
        raise SystemExit(
            "Namespaces with a /tmp and a network of their own need root; run as root."
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # which ends the runs too
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
