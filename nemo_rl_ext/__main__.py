"""``python -m nemo_rl_ext DRIVER ARGS...``: run a driver of NeMo RL with the patches installed.

For an environment that switches torch's autoload off.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from nemo_rl_ext.patch_finder import install

USAGE = "usage: python -m nemo_rl_ext DRIVER [ARGS...]   e.g. examples/run_grpo.py --config X.yaml"


def main(arguments: list[str]) -> None:
    """Run ``arguments[0]`` as ``python`` would, with the rest as its arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    driver = Path(arguments[0])
    if not driver.is_file():
        raise SystemExit(f"'{driver}' is no file. {USAGE}")
    install()
    sys.argv = [str(driver), *arguments[1:]]
    sys.path[0] = str(driver.resolve().parent)  # as python does; -m had put the working folder
    runpy.run_path(str(driver), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
