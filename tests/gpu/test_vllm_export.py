"""An exported folder in stock vLLM, its source in vLLM with fp8rl."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.export import plan_export, write_export
from support.gpu_engine import kv_scales, make_checkpoints
from vllm_fp8rl.commands.export_check import check_export

log = logging.getLogger(__name__)


@pytest.mark.parametrize("kv_cache", ["auto", "fp8_e4m3"])
def test_stock_vllm_beside_fp8rl(tmp_path: Path, kv_cache: str) -> None:
    """``--check`` with engines, each in a process of its own."""
    recipe = Recipe.from_dict({"pins": {"last": 1}, "kv_cache": {"dtype": kv_cache}})
    checkpoint = make_checkpoints(tmp_path)["a"]
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps(kv_scales(checkpoint, recipe)))
    plan = plan_export(checkpoint, recipe, kv_scales=scales)
    codes = {}
    for device in ("cpu", "cuda"):
        write_export(plan, tmp_path / device, device=device)
        codes[device] = load_file(tmp_path / device / "model-00001-of-00001.safetensors")
    for name, tensor in codes["cpu"].items():
        assert torch.equal(tensor.view(torch.uint8), codes["cuda"][name].view(torch.uint8)), name
    found = check_export(checkpoint, tmp_path / "cuda", recipe)
    log.info("%s", found.facts)
    assert found.facts["compared"].startswith("stock vLLM")
    assert not found.problems
