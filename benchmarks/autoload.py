"""What the entry point ``torch.backends`` costs a process without NeMo RL: target 1 ms.

    python benchmarks/autoload.py [--runs 20]

Each run is a process of its own. Torch is imported with its autoload off; then the time of what
autoload would run, import of the module included, is taken, and the share that the finder on
``sys.meta_path`` adds to a later import.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import importlib.metadata, sys, time, torch
point = next(p for p in importlib.metadata.entry_points(group="torch.backends")
             if p.name == "fp8rl")
began = time.perf_counter()
point.load()()
took = time.perf_counter() - began
finder = sys.meta_path[0]
began = time.perf_counter()
for _ in range(10000):
    finder.find_spec("some.other.module")
print(took * 1e3, (time.perf_counter() - began) / 10000 * 1e6)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has compiled modules
    command = [sys.executable, "-c", CODE]
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        for _ in range(runs + 1):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            pairs.append([float(x) for x in done.stdout.split()])
    pairs.pop(0)  # it compiled
    took, look = zip(*pairs, strict=True)
    sys.stdout.write(
        f"entry point, {runs} processes: median {statistics.median(took):.3f} ms, "
        f"largest {max(took):.3f} ms\n"
        f"finder, per import of another module: {statistics.median(look):.2f} us\n"
    )


if __name__ == "__main__":
    main()
