"""Run by test_run.py: the job of its argument, as JSON, without the command around it."""

from __future__ import annotations

import json
import os
import sys

from fp8rl_demo.worker import main

if __name__ == "__main__":
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.exit(main(json.dumps({**json.loads(sys.argv[1]), "events_fd": nowhere})))
