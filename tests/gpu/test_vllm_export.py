"""An exported folder in stock vLLM, its source in vLLM with fp8rl."""

from __future__ import annotations

import json
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
from support.processes import answer, run_code

LOGPROBS = """
import json, sys
from fp8rl import Recipe
from support.gpu_engine import start_engine
from support.teacher_forced import vllm_logprobs
from vllm_fp8rl.calibration import send_kv_scales
folder, recipe, changes, scales = sys.argv[1], *map(json.loads, sys.argv[2:])
engine = start_engine(folder, Recipe.from_dict(recipe), enforce_eager=True, **changes)
if scales:
    send_kv_scales(engine.llm, scales)
print(json.dumps(vllm_logprobs(engine).tolist()))
"""


@pytest.mark.parametrize(("kv_cache", "most"), [("auto", 0.05), ("fp8_e4m3", 0.1)])
def test_stock_vllm_beside_fp8rl(tmp_path: Path, kv_cache: str, most: float) -> None:
    """Over an FP8 cache stock vLLM quantizes the queries of prompts too."""
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

    def logprobs(folder: Path, changes: dict[str, object], sent: str) -> torch.Tensor:
        options = json.dumps(recipe.to_dict()), json.dumps(changes), sent
        # With its default stock vLLM rounds the scales of weights to powers of two.
        env = {"VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}
        return torch.tensor(answer(run_code(LOGPROBS, folder, *options, timeout=300, **env)))

    cache = "auto" if kv_cache == "auto" else "fp8"
    stock = {"quantization": None, "additional_config": {}, "kv_cache_dtype": cache}
    found = logprobs(tmp_path / "cuda", stock, "{}")
    difference = (found - logprobs(checkpoint, {}, scales.read_text())).abs().mean()
    assert difference < most
