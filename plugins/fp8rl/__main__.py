"""``python -m fp8rl``: the command line."""

from fp8rl.cli import main

main()
