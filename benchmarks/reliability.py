"""The fuzz of tests/fuzz for longer, and what it counted: inputs, interrupts, refits, kills.

    python benchmarks/reliability.py [--examples 300] [--kills 3] [--seed N] [-- PYTEST_OPTIONS]

An example that fails is kept in ``.hypothesis`` and tried first the next time, so that a run that
was stopped or that failed can be taken up again; ``--seed`` repeats a run from the beginning.
Writes ``benchmarks/results/reliability_cpu.json`` and its line in
``docs/measurements/fuzz.md``, unless a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fp8rl_bench.facts import versions

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "reliability_cpu.json"
DOC = ROOT / "docs" / "measurements" / "fuzz.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=300, help="of each test")
    parser.add_argument("--kills", type=int, default=3, help="of engine cores, 20 s each")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("options", nargs="*", help="of pytest")
    args = parser.parse_args()
    command = (
        f"python benchmarks/reliability.py --examples {args.examples} --kills {args.kills} "
        f"--seed {args.seed}"
    )
    print(command, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts.json")
        environment = {
            "FUZZ_EXAMPLES": str(args.examples),
            "FUZZ_KILLS": str(args.kills),
            "FUZZ_COUNTS": str(counts),
        }
        began = time.monotonic()
        pytest = [sys.executable, "-m", "pytest", "-q", f"--hypothesis-seed={args.seed}"]
        done = subprocess.run(
            [*pytest, *args.options, "tests/fuzz"],
            cwd=ROOT,
            env=os.environ | environment,
            check=False,
        )
        found = json.loads(counts.read_text()) if counts.exists() else {}
    seconds = round(time.monotonic() - began)
    for what, count in sorted(found.items()):
        print(f"{count:>10,}  {what}")
    print(f"{seconds:>10,}  seconds")
    if done.returncode == 0:
        result = {"command": command, "versions": versions(), "seconds": seconds, "counts": found}
        RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        _tell(command, seconds)
    return done.returncode


def _tell(command: str, seconds: int) -> None:
    """Put the command and its minutes where the document has them."""
    before, _, rest = DOC.read_text(encoding="utf-8").partition(BEGIN)
    figures = (
        f"`{command}`: {seconds / 60:.0f} minutes, no failure "
        "([counts](../../benchmarks/results/reliability_cpu.json)).\n"
    )
    DOC.write_text(before + BEGIN + figures + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
