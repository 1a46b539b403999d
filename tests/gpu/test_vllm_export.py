"""An exported folder in stock vLLM, its source in vLLM with fp8rl; adapters over an FP8 base."""

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
from fp8rl.recipe import KVCache, Pins
from support.gpu_engine import PROMPTS, kv_scales, make_checkpoints, start_engine
from support.lora import LORA, adapter, with_adapter
from support.wrong_tensors import slope
from vllm_fp8rl.commands.export_check import check_export
from vllm_fp8rl.testing.hf_reference import gap, load_reference

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


def test_adapters_over_an_fp8_base(tmp_path: Path) -> None:
    """Under captured graphs; the floor is transformers in BF16 beside itself in float32."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    recipe = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(last=1))
    checkpoint = make_checkpoints(tmp_path)["a"]
    folder = adapter(tmp_path / "step-1", load_file(checkpoint / "model.safetensors"), 1)
    engine = start_engine(checkpoint, recipe, **LORA)
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, detokenize=False, seed=7),
        use_tqdm=False,
        lora_request=LoRARequest("step-1", 1, str(folder)),
    )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    found = torch.tensor(
        [
            entry[token].logprob
            for output, answer in zip(outputs, answers, strict=True)
            for entry, token in zip(output.outputs[0].logprobs, answer, strict=True)
        ]
    )

    def expected(adapted: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        reference = load_reference(checkpoint, recipe, device="cuda", dtype=dtype)
        reference = with_adapter(reference, folder) if adapted else reference
        sequences = [p + a for p, a in zip(PROMPTS, answers, strict=True)]
        rows = reference.many(sequences).split([len(sequence) - 1 for sequence in sequences])
        return torch.cat([row[-len(a) :] for row, a in zip(rows, answers, strict=True)])

    exact, own, plain = expected(True), expected(True, torch.bfloat16), expected(False)
    log.info("floor %.4f, engine %.4f nats", gap(own, exact).mean, gap(found, exact).mean)
    assert gap(found, exact).mean < 1.5 * gap(own, exact).mean
    assert slope(found, exact, plain) > 0.75 * slope(own, exact, plain)
    engine.llm.llm_engine.engine_core.shutdown()
