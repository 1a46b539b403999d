"""A KV connector of vLLM that keeps keys and values in files, and forgets them when it is asked to.

vLLM's own ``ExampleConnector`` but for ``reset_cache``, which that one lacks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ForgetfulConnector(ExampleConnector):
    def reset_cache(self) -> bool:
        for folder in Path(self._storage_path).iterdir():
            shutil.rmtree(folder)
        return True
