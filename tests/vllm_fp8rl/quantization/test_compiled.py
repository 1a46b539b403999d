"""FP8 layers under vLLM's tracer: ``fullgraph=True``, without half a minute of Inductor."""

from __future__ import annotations

import pytest

from support.processes import answer, run_forked
from support.tiny import make_moe_checkpoint

CODE = """
import json
import sys
from pathlib import Path
from torch._dynamo.utils import counters
from vllm.config import CompilationMode
from support.engine import load_tensors, start_engine
from fp8rl import Recipe
from vllm_fp8rl.refit import refit

a, b = (Path(name) for name in sys.argv[1:])
recipe = Recipe.from_dict({"kv_cache": {"dtype": "auto"}})
once = {"mode": CompilationMode.DYNAMO_TRACE_ONCE, "backend": "eager"}
engine = start_engine(a, recipe, enforce_eager=False, compilation_config=once)
traced = counters["stats"]["unique_graphs"]
prompt = [[5, 6, 7, 8]]
first = engine.greedy(prompt)
refit(engine.llm, load_tensors(b).items(), expect_kv_scales=False)
second = engine.greedy(prompt)
refit(engine.llm, load_tensors(a).items(), expect_kv_scales=False)
print(json.dumps([traced > 0, first != second, engine.greedy(prompt) == first]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("experts_on_a_cpu")
def test_compiled_model_follows_refits(tmp_path):
    """With an MLP in one layer and experts in the other."""
    paths = [
        make_moe_checkpoint(tmp_path / name, seed, mlp_only_layers=[0])
        for seed, name in enumerate("ab")
    ]
    script = tmp_path / "compiled.py"
    script.write_text(CODE)
    variables = {
        "TORCHDYNAMO_DISABLE": "0",  # support/engine.py switches it off for the other tests
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    assert answer(run_forked(script, *paths, timeout=540, **variables)) == [True, True, True]
