"""vLLM's own trainers into engines in other processes: CUDA IPC, and NCCL from another GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.processes import run_script

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm.distributed.weight_transfer.clients")  # from 0.28 on

SCRIPT = Path(__file__).with_name("executor_cases.py")
INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""IPC handles travel pickled."""


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_trainer_leaves_what_a_refit_leaves(transport: str, tmp_path: Path) -> None:
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("the trainer needs a GPU of its own")
    found = run_script(SCRIPT, transport, tmp_path, timeout=400, variables=INSECURE)
    a, b = found.pop("a"), found.pop("b")
    refused = [found.pop(f"refused, packed {packed}") for packed in (True, False)]
    assert a != b
    assert all("has shape" in error for error in refused)
    assert found == {name: a if name.startswith("a") else b for name in found}
    assert len(found) == 6
