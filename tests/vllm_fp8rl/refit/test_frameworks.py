"""The ways in which TRL and verl put weights into vLLM, and the recipes in examples/ for them."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.recipe import KVCache
from support.engine import PROMPTS, SCALES, load_tensors
from support.processes import environment
from vllm_fp8rl import WEIGHT_TRANSFER_BACKENDS, engine_args
from vllm_fp8rl.quantization import config
from vllm_fp8rl.refit.receiver.worker import has_refit_methods

EXAMPLES = Path(__file__).parents[3] / "examples"
DOC = (EXAMPLES.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.usefixtures("restored", "examples")


def doc_block(heading: str) -> str:
    """The first code block below a heading of docs/vllm.md."""
    section = DOC.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return section.split("```")[1].split("\n", 1)[1].rstrip()


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of examples, from which modules can be imported."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_a_model_folder_that_asks_for_fp8(other_engine, checkpoints, tmp_path):
    """For frameworks that make their own LLM without a word on quantization, as TRL does."""
    recipe = Recipe.from_dict({"pins": {"last": 1}, "kv_cache": {"dtype": "auto"}})
    folder = tmp_path / "b"
    shutil.copytree(checkpoints["b"], folder)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8rl", "recipe": recipe.to_dict()}
    (folder / "config.json").write_text(json.dumps(described))
    silent = {"quantization": None, "additional_config": {}, "kv_cache_dtype": "auto"}
    asked = other_engine(folder, recipe, **silent)
    assert asked.llm.llm_engine.vllm_config.quant_config.get_name() == "fp8rl"
    assert asked.llm.llm_engine.vllm_config.additional_config["fp8rl"] == recipe.to_dict()
    assert asked.model.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fn
    assert asked.model.model.layers[1].mlp.down_proj.weight.dtype == torch.float32
    assert asked.greedy(PROMPTS) == other_engine(checkpoints["b"], recipe).greedy(PROMPTS)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = dict(policy.named_parameters())
    for name, tensor in load_tensors(checkpoints["b"]).items():
        assert torch.equal(loaded[name], tensor)


def test_recipe_of_the_model_yields_to_that_of_the_engine():
    asked = {"pins": {"last": 1}}
    assert config.read_recipe({}, asked) == Recipe.from_dict(asked)
    assert config.read_recipe({"fp8rl": {}}, asked) == Recipe()
    with pytest.raises(RecipeError, match=r"quantization_config\.recipe"):
        config.read_recipe({}, {"pin": {}})
    with pytest.raises(UnsupportedError, match="quantized with 'gptq'"):
        config.Fp8RLConfig.from_config({"quant_method": "gptq"})


def parsed(checkpoint: Path, flags: list[str]) -> Any:
    """The arguments of an engine, as vLLM's server reads them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(checkpoint), *flags]))


def test_serve_command(checkpoints):
    """The flags of docs/vllm.md."""
    command = doc_block("`vllm serve`").split("\npython ")[0]
    mode, *words = shlex.split(command.replace("\\\n", ""))
    start = "VLLM_SERVER_DEV_MODE=1 vllm serve my-model --host 127.0.0.1"
    assert [mode, *words[:5]] == start.split()
    example = (EXAMPLES / "vllm_serve_refit.py").read_text(encoding="utf-8")
    assert all(line.strip(" \\") in example for line in command.splitlines())
    arguments = parsed(checkpoints["a"], words[5:])
    recipe = config.read_recipe(arguments.additional_config)
    assert recipe.pins.last == 1 and arguments.generation_config == "vllm"
    expected = engine_args(recipe) | {"additional_config": arguments.additional_config}
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert arguments.weight_transfer_config.backend in WEIGHT_TRANSFER_BACKENDS
    assert has_refit_methods(arguments.worker_extension_cls)


def test_offline_recipe(engine, checkpoints, tokens):
    space = {
        "llm": engine.llm,
        "weights": load_tensors(checkpoints["b"]),
        "conversations": [[5, 6, 7, 8, 9, 10], list(range(20, 60))],
    }
    code = DOC.split("<!-- test: offline -->\n```python\n")[1].split("```")[0].rstrip()
    first, _, rest = code.partition("calibrate_kv_scales(llm")
    exec(first, space)
    assert engine.greedy(PROMPTS) == tokens["b"]
    exec(f"found = calibrate_kv_scales(llm{rest}", space)
    assert {name for name in space["found"] if name.endswith(("k_scale", "v_scale"))} == set(SCALES)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_push_to_an_engine_with_processes_of_its_own(other_engine, checkpoints, monkeypatch):
    """As a user runs it: vLLM's engine core is a process of its own there."""
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 16 << 20,
        "skip_tokenizer_init": True,
    }
    push: Any = importlib.import_module("vllm_push")
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("PYTHONPATH", environment(EXAMPLES)["PYTHONPATH"])
        pushed = push.main(str(checkpoints["b"]), arguments)
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    (wanted,) = other_engine(checkpoints["b"], recipe).greedy([[5, 6, 7]], tokens=5)
    assert pushed == wanted
