#!/usr/bin/env python
"""Write docs/quickstart_gpu.ipynb from docs/quickstart_gpu.md: text as it is, commands as cells.

    python tools/quickstart_notebook.py

``tests/test_docs.py`` compares the notebook with what the page gives.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quickstart_gpu.md"
FILE = PAGE.with_suffix(".ipynb")


def notebook() -> str:
    """Return the text of the notebook."""
    # Of the split every second part is the inside of a block of commands.
    parts = re.split(
        r"^```console\n(.*?)^```\n", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        if number % 2:
            source = f'%%bash\nset -ex\ncd "$(git rev-parse --show-toplevel)"\n{part}'.strip()
            code = {"cell_type": "code", "execution_count": None, "outputs": []}
            cells.append({**code, "metadata": {}, "source": source.splitlines(keepends=True)})
        elif part.strip():
            lines = part.strip().splitlines(keepends=True)
            cells.append({"cell_type": "markdown", "metadata": {}, "source": lines})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    body = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(notebook(), encoding="utf-8")
