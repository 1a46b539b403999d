"""A folder of ``fp8rl export`` in vLLM, stock and with fp8rl, and in transformers."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.export import plan_export, write_export
from fp8rl.models.families import FUSED
from fp8rl.numerics import dequantize_block
from fp8rl.recipe import KVCache, Pins
from support.engine import FUSED as LINEARS
from support.engine import (
    LAYERS,
    PROMPTS,
    keep_process_groups,
    same_bits,
    start_engine,
)
from support.mla import LATENT
from support.no_torchvision import without_torchvision
from support.teacher_forced import vllm_logprobs
from support.tiny import make_family_checkpoint, make_qwen35_checkpoint
from vllm_fp8rl.calibration import send_kv_scales

RECIPE = Recipe(pins=Pins(last=1))
SCALES = {
    f"model.layers.{layer}.self_attn.{role}_scale": 2.0 ** (-4 - layer)
    for layer in range(LAYERS)
    for role in "qkv"
}


def export(checkpoint: Path, out: Path, recipe: Recipe = RECIPE) -> Path:
    scales = out.with_suffix(".json")
    scales.write_text(json.dumps(SCALES))
    write_export(plan_export(checkpoint, recipe, kv_scales=scales), out)
    return out


@pytest.fixture(scope="module")
def out(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(checkpoints["a"], tmp_path_factory.mktemp("exported") / "a")


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_fp8rl_holds_the_same_codes_and_scales_as_from_the_checkpoint(
    engine, other_engine, checkpoints, out
):
    """The folder names its recipe, pins included, so no argument has to."""
    start = {"scaled": False}
    source = other_engine(checkpoints["a"], RECIPE, **start)
    send_kv_scales(source.llm, SCALES)
    exported = other_engine(out, RECIPE, additional_config={}, **start)
    assert exported.state().keys() == source.state().keys()
    for name, tensor in source.state().items():
        assert same_bits(exported.state()[name], tensor), name
    assert exported.kv_scales() == source.kv_scales()
    assert torch.equal(vllm_logprobs(exported), vllm_logprobs(source))
    assert exported.greedy(PROMPTS) == source.greedy(PROMPTS)


def test_stock_vllm_loads_it(engine, out, monkeypatch):
    """vLLM's own method ``fp8`` with every tensor in place."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Kernel

    def product(self, layer, x, bias=None):
        weight = dequantize_block(layer.weight.data, layer.weight_scale_inv.data, dtype=x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(Kernel, "is_supported", classmethod(lambda cls, cap=None: (True, None)))
    monkeypatch.setattr(Kernel, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(Kernel, "apply_weights", product)
    arguments = {"quantization": None, "additional_config": {}, "dtype": "bfloat16"}
    try:
        stock = start_engine(out, RECIPE, kv_cache_dtype="fp8", **arguments)
    except NotImplementedError as error:
        if "requires x86 with AVX-512" not in str(error):
            raise
        pytest.skip(f"stock vLLM: {error}")
    keep_process_groups(stock)
    assert type(stock.llm.llm_engine.vllm_config.quant_config).__name__ == "Fp8Config"
    stored, live = read(out), stock.state()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, parts in LINEARS.items():
            scale = f"{prefix}.{name}.weight_scale_inv"
            if layer == LAYERS - 1:
                assert scale not in live  # pinned
                continue
            for suffix in ("weight", "weight_scale_inv"):
                whole = [stored[f"{prefix}.{part}.{suffix}"] for part in parts]
                expected = torch.cat([part.view(torch.uint8) for part in whole])
                assert torch.equal(live[f"{prefix}.{name}.{suffix}"].view(torch.uint8), expected)
        attention = stock.model.model.layers[layer].self_attn.attn
        for role in "qkv":
            scale = SCALES[f"model.layers.{layer}.self_attn.{role}_scale"]
            assert getattr(attention, f"_{role}_scale_float") == scale
            assert getattr(attention, f"_{role}_scale").item() == scale
    assert len(stock.greedy(PROMPTS)) == len(PROMPTS)


def test_transformers_reads_the_config(out):
    """Its loader needs a GPU or accelerate; its config and its dequantization do not."""
    from transformers import AutoConfig
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = FineGrainedFP8Config.from_dict(AutoConfig.from_pretrained(out).quantization_config)
    assert (config.weight_block_size, config.activation_scheme) == ([128, 128], "dynamic")
    stored = read(out)
    for name, tensor in stored.items():
        if name.endswith("proj.weight"):
            module = name.removesuffix(".weight")
            fp8 = tensor.dtype == torch.float8_e4m3fn
            assert should_convert_module(module, config.modules_to_not_convert) == fp8
            if fp8:
                scale = stored[f"{name}_scale_inv"]
                theirs = Fp8Dequantize(None)._dequantize_one(tensor, scale, torch.float32)
                assert torch.equal(theirs, dequantize_block(tensor, scale))


ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")
LATENT_ATTENTION = ("self_attn.fused_qkv_a_proj", "self_attn.q_b_proj", "self_attn.o_proj")
SIGMOIDS = LATENT | {"n_shared_experts": 1, "first_k_dense_replace": 0}
FAMILIES_WITH_EXPERTS: dict[str, tuple[str, str, str, tuple[str, ...], dict]] = {
    # model_type: file and class in vLLM, name of the experts' block, attention, keys of the config
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", "mlp", ATTENTION, {}),
    "mixtral": ("mixtral", "MixtralForCausalLM", "block_sparse_moe", ATTENTION, {}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2ForCausalLM", "mlp", ATTENTION, {}),
    "deepseek_v3": ("deepseek_v2", "DeepseekV3ForCausalLM", "mlp", LATENT_ATTENTION, SIGMOIDS),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5MoeForConditionalGeneration", "mlp", ATTENTION, {}),
}
"""Of each way in which vLLM's classes name their layers one."""


@pytest.mark.parametrize("kind", FAMILIES_WITH_EXPERTS)
def test_vllm_skips_the_pinned_modules_and_no_others(tmp_path, kind):
    """By the names that vLLM's own classes give their layers, through the map of the class."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    file, name, block, attention, changes = FAMILIES_WITH_EXPERTS[kind]
    with without_torchvision():
        module = importlib.import_module(f"vllm.model_executor.models.{file}")
    source = inspect.getsource(module)
    assert f'prefix=f"{{prefix}}.{block}"' in source, "the block has another name in this vLLM"
    if kind == "qwen3_5_moe_text":  # its last layer alone has keys and values
        checkpoint = make_qwen35_checkpoint(tmp_path / "model", 3, experts=True, vision=True)
        layers, prefix = range(2, 4), "language_model.model.layers"
    else:
        checkpoint = make_family_checkpoint(tmp_path / "model", 3, kind, **changes)
        layers, prefix = range(LAYERS), "model.layers"
    recipe = Recipe(pins=Pins(last=1), kv_cache=KVCache(dtype="auto"))
    config = Fp8Config.from_config(plan_export(checkpoint, recipe).quantization_config())
    assert (config.weight_block_size, config.activation_scheme) == ([128, 128], "dynamic")
    mapper = getattr(getattr(module, name), "hf_to_vllm_mapper", None)
    if mapper is not None:
        config.apply_vllm_mapper(mapper)
    for layer in layers:
        mixer = attention
        if kind == "qwen3_5_moe_text" and layer == layers[0]:
            mixer = ("linear_attn.in_proj_qkvz", "linear_attn.out_proj")
        for module_name in (*mixer, f"{block}.experts"):
            full = f"{prefix}.{layer}.{module_name}"
            skipped = is_layer_skipped(full, config.ignored_layers, FUSED)
            assert skipped == (layer == layers[-1]), full
        if block == "mlp" and kind != "minimax_m2":  # these routers ask nobody
            assert is_layer_skipped(f"{prefix}.{layer}.mlp.gate", config.ignored_layers, FUSED)
    # The output projection under a wrapper has a class that Fp8Config leaves alone by itself.
    other = "visual.blocks.0.attn.qkv" if kind == "qwen3_5_moe_text" else "lm_head"
    assert is_layer_skipped(other, config.ignored_layers, FUSED)
