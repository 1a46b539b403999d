"""Multi-latent attention and DeepSeek's experts in Megatron-Core, against transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import quantize_block
from megatron_fp8rl import convert
from megatron_fp8rl.compat import without_query_norm
from megatron_fp8rl.export import export_hf, fp8_wire
from megatron_fp8rl.kv.observers import QKVObserver
from support.megatron import convert_alone, hf_gpt, prompts, weight_codes_hf
from support.mla import ALL, PUBLISHED, RECIPE, SHAPES
from support.numeric import same_codes
from support.tiny import make_mla_checkpoint

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mla")
    return {name: make_mla_checkpoint(root / name, 3, **shape) for name, shape in SHAPES.items()}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_a_bias_that_training_has_moved_is_exported(mcore, paths):
    model = hf_gpt(paths["moonlight"], torch.bfloat16)
    model.decoder.layers[1].mlp.router.expert_bias += 0.25
    moved = dict(export_hf(model))[BIAS] - tensors_of(paths["moonlight"])[BIAS]
    assert torch.allclose(moved, torch.full_like(moved, 0.25), atol=1e-6)


@pytest.mark.parametrize("name", ["moonlight", "v3"])
def test_codes_are_those_of_the_exported_tensors(mcore, paths, name):
    model = hf_gpt(paths[name], torch.bfloat16)
    conversion = convert_alone(model, ALL)
    leaves = {module.rpartition(".")[2] for module in conversion.modules}
    down = {"q_a_proj", "q_b_proj"} if name == "v3" else {"q_proj"}
    mlp = {"gate_up_proj", "down_proj"}
    assert leaves == {*down, *mlp, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    exported = dict(export_hf(model))
    for module in conversion.modules.values():
        for part, codes in weight_codes_hf(module).items():
            assert same_codes(codes, quantize_block(exported[f"{part}.weight"])), part


def test_every_gradient_is_there(mcore, paths):
    model = hf_gpt(paths["v3"])
    convert_alone(model, ALL)
    tokens = torch.tensor(prompts()[:2])
    positions = torch.arange(tokens.shape[1]).expand(2, -1)
    with torch.compiler.set_stance("force_eager"):
        model(tokens, positions, None, labels=tokens).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or ".local_experts." in name, name


def test_only_vectors_and_the_ragged_latents_travel_without_codes(mcore, paths, caplog):
    model = hf_gpt(paths["moonlight"], torch.bfloat16)
    policy = convert_alone(model, RECIPE).policy
    wire = dict(fp8_wire(export_hf(model), policy))
    plain = {n for n, t in wire.items() if t.ndim == 2 and t.dtype == torch.bfloat16}
    kept = {f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(3)}
    kept |= {f"model.layers.{i}.mlp.gate.weight" for i in (1, 2)}
    kept |= {f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight" for i in range(3)}
    assert plain == kept | {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_region_without_the_norm_of_queries(monkeypatch):
    """Megatron-LM 0.20 makes it; elsewhere nothing is changed."""

    class Resolver:
        linear_impl = "linear"

        def _mla_fused_linear_or_default(self, module_spec, module_name):
            return f"norm and {module_name}"

    module = ModuleType("megatron.core.transformer.mla_qk_norm_config")
    module.QKNormConfigResolver = Resolver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    choose, names = "_mla_fused_linear_or_default", ("linear_q_proj", "linear_kv_up_proj")
    with without_query_norm():
        made = [getattr(Resolver(), choose)(None, name) for name in names]
    assert made == ["linear", "norm and linear_kv_up_proj"]
    assert getattr(Resolver(), choose)(None, names[0]) == "norm and linear_q_proj"
    monkeypatch.setitem(sys.modules, module.__name__, None)
    with without_query_norm():
        pass


def test_what_is_refused(mcore, paths):
    model = hf_gpt(paths["moonlight"])
    with pytest.raises(UnsupportedError, match="cache holds latents and not k and v"):
        QKVObserver(model)
    query = model.decoder.layers[1].self_attention.linear_q_proj
    query.layer_norm_weight = torch.nn.Parameter(torch.ones(256))
    with pytest.raises(UnsupportedError, match=r"1.self_attention.linear_q_proj' begins with a no"):
        convert(model, RECIPE)
    del query.layer_norm_weight
    down = model.decoder.layers[1].self_attention.linear_kv_down_proj
    down.output_size *= 2  # as over two ranks
    with pytest.raises(UnsupportedError, match=r"rows of 'kv_a_proj_with_mqa' on this rank, no"):
        convert(model, RECIPE)
    convert_alone(model, PUBLISHED).close()  # whose pins have the kind
    down.output_size //= 2
