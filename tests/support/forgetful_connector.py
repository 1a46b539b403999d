"""vLLM's ``ExampleConnector`` with the ``reset_cache`` that it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ForgetfulConnector(ExampleConnector):
    def reset_cache(self) -> bool:
        for folder in Path(self._storage_path).iterdir():
            shutil.rmtree(folder)
        return True
