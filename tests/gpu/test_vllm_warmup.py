"""DeepGEMM's kernels, compiled ahead by the real package and the real nvcc, meet the engine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import answer, run_code

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

# In a process of its own: DeepGEMM reads the place of its cache once.
START = """
import json, sys
from pathlib import Path
from support.gpu_engine import make_checkpoints, start_engine
from fp8rl import Recipe

recipe = Recipe.from_dict({"kv_cache": {"dtype": "auto"}})
path, cache = Path(sys.argv[1]), Path(sys.argv[2])
paths = {"a": path / "a"} if path.exists() else make_checkpoints(path)
engine = start_engine(paths["a"], recipe, enforce_eager=True, max_num_batched_tokens=1024)
warmup = engine.llm.llm_engine.vllm_config.quant_config.resolve().warmup
warmup.watcher and warmup.watcher.join(120)
done = warmup.watcher is None or not warmup.watcher.is_alive()
made = sorted(folder.name for folder in cache.glob("cache/*"))
engine.greedy()
engine.llm.generate(
    [{"prompt_token_ids": list(range(5, 5 + count))} for count in (1, 3, 30, 70, 140, 200)],
    use_tqdm=False,
)
after = sorted(folder.name for folder in cache.glob("cache/*"))
kernel = engine.model.get_submodule("model.layers.0.mlp.down_proj").quant_method.kernel
print(json.dumps({
    "backend": kernel.backend, "done": done, "started": warmup.watcher is not None,
    "made": made, "after": after,
}))
"""


def start(path: Path, cache: Path) -> dict[str, Any]:
    return answer(run_code(START, path, cache, timeout=300, DG_JIT_CACHE_DIR=str(cache)))


def test_no_kernel_is_left_to_be_compiled_by_a_step(tmp_path: Path) -> None:
    cache = tmp_path / "jit"
    cold = start(tmp_path / "model", cache)
    assert cold["backend"] == "deep_gemm"
    assert cold["made"] == cold["after"] != []
    assert cold["done"] and cold["started"]
    listed = {
        name for stamp in cache.glob("fp8rl/*.json") for name in json.loads(stamp.read_text())
    }
    assert listed == set(cold["made"])  # DeepGEMM itself has asked for no other
    warm = start(tmp_path / "model", cache)
    assert not warm["started"]
    assert warm["after"] == cold["made"]
