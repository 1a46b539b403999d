"""The script that ``launch`` runs for :func:`support.parallel.cases.main`, given what it takes.

A file of its own, because writing a distributed checkpoint starts a process that imports the main
module again, which takes seconds where that imports megatron.
"""

if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    from support.parallel.cases import main

    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
