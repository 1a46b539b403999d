"""``fp8rl export``: what is written, what is refused, and what stays when it breaks off."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fp8rl import PluginManager, Recipe, cli
from fp8rl.errors import (
    Fp8RLError,
    ModelError,
    OptionError,
    PinError,
    ScaleError,
    UnsupportedError,
)
from fp8rl.export import plan_export, write_export
from fp8rl.models.folder import RECIPE_FILE, folder_module_names, folder_tensors
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import KVCache, Pins
from fp8rl.weight_files import WeightFile
from support.model_folders import CONFIG, model, read, weights
from support.processes import run_code

NO_KV = Recipe(kv_cache=KVCache(dtype="auto"))
SCALES = {
    f"model.layers.{layer}.self_attn.{role}_scale": 0.0625 * (layer + 1)
    for layer in range(2)
    for role in ("attn.q", "k", "v")
}
MOE = {"model_type": "qwen3_moe", "num_experts": 3, "num_hidden_layers": 2}
DENSE, K0 = ModelSpec.dense(2).names, "model.layers.0.self_attn.k_scale"
TENSORS, OF_MOE = weights(DENSE), weights(ModelSpec.of(MOE).names)


def pinned(**pins) -> Recipe:
    return NO_KV.model_copy(update={"pins": Pins(**pins)})


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return model(tmp_path / "dense", dict(TENSORS))


def exported(checkpoint: Path, out: Path, recipe: Recipe = NO_KV, **options) -> dict:
    """Export and return the ``quantization_config``."""
    plan = plan_export(checkpoint, recipe, kv_scales=options.pop("kv_scales", None))
    write_export(plan, out, **options)
    return json.loads((out / "config.json").read_text())["quantization_config"]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Names, dtypes and bytes."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


# What is written


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_weights_are_codes_and_scales_by_the_formula_in_float64(dense, tmp_path, scale_format):
    """Every weight lies within half a step of E4M3 of its source, and scales are amax / 448."""
    recipe = NO_KV.model_copy(
        update={"weights": NO_KV.weights.model_copy(update={"scale_format": scale_format})}
    )
    exported(dense, tmp_path / "out", recipe)
    source, found = read(dense), read(tmp_path / "out")
    fp8 = [name for name in found if found[name].dtype == torch.float8_e4m3fn]
    assert len(fp8) == 14
    for name in fp8:
        codes, scale_inv = found[name], found[f"{name}_scale_inv"]
        rows, columns = codes.shape
        assert scale_inv.dtype == torch.float32
        assert scale_inv.shape == (-(-rows // 128), -(-columns // 128))
        w = source[name].double()
        for i in range(scale_inv.shape[0]):
            for j in range(scale_inv.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale = scale_inv[i, j].double()
                least = w[block].abs().max() / 448
                exact = least if scale_format == "fp32" else 2 ** torch.ceil(torch.log2(least))
                assert abs(scale - exact) <= 1e-6 * exact
                ideal = w[block] / scale
                step = 2 ** torch.floor(torch.log2(ideal.abs().clamp(min=2**-6))) / 8
                assert (
                    (codes[block].double() - ideal).abs() <= step / 2 + 1e-6 * ideal.abs()
                ).all()


def test_what_is_not_fp8_keeps_its_bytes(tmp_path):
    """Tensors of odd names too, which look like a scale or another layer's weight."""
    odd = ("x", "é.weight", "a.scale", "k_scale.weight", "model.layers.9.mlp.up_proj.weight")
    source = TENSORS | {name: torch.full((1,), 9.0).bfloat16() for name in odd}
    exported(model(tmp_path / "in", source), tmp_path / "out", pinned(last=1))
    found = read(tmp_path / "out")
    assert found.keys() >= source.keys()
    fp8 = {name for name in found if name.endswith("_scale_inv")}
    assert len(fp8) == 7
    assert all(name.startswith("model.layers.0.") for name in fp8)
    for name, tensor in source.items():
        if f"{name}_scale_inv" not in fp8:
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("files", [1, 3])
def test_files_are_small_and_the_index_is_right(tmp_path, files):
    """None above the limit unless one tensor is; the codes are those of a single file."""
    checkpoint = model(tmp_path / "in", TENSORS, files=files)
    out, limit, seen = tmp_path / "out", 200_000, []
    exported(checkpoint, out, shard_bytes=limit, progress=seen.append)
    assert sorted(seen) == sorted(read(checkpoint))
    written = sorted(out.glob("*.safetensors"))
    assert len(written) > 4
    assert [f.name for f in written] == [
        f"model-{n:05}-of-{len(written):05}.safetensors" for n in range(1, len(written) + 1)
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {}
    for file in written:
        tensors = load_file(file)
        stored |= dict.fromkeys(tensors, file.name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(out).values())
    assert {name: file.name for name, file in folder_tensors(out).items()} == stored
    exported(model(tmp_path / "one", TENSORS), tmp_path / "a")
    assert_equal(read(out), read(tmp_path / "a"))


def test_tensors_of_all_experts_are_split(tmp_path):
    """transformers 5 may hold the experts of a layer in two tensors; engines load them by one."""
    single = weights(ModelSpec.of(MOE).names)
    fused = {name: tensor for name, tensor in single.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [
            [
                single[f"{prefix}.{n}.{leaf}.weight"]
                for leaf in ("gate_proj", "up_proj", "down_proj")
            ]
            for n in range(3)
        ]
        fused[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u, _ in parts])
        fused[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in parts])
    exported(model(tmp_path / "in", single, **MOE), tmp_path / "one")
    exported(model(tmp_path / "fused", fused, **MOE), tmp_path / "all")
    one, together = read(tmp_path / "one"), read(tmp_path / "all")
    assert_equal(one, together)
    wrong = model(tmp_path / "wrong", fused, **MOE | {"num_experts": 4})
    refused(wrong, UnsupportedError, "experts.* has shape .*, which does not hold")


def test_layers_beside_the_model_stay_in_bf16(tmp_path):
    """Draft layers of multi-token prediction: no rollout of fp8rl runs them."""
    draft = "model.layers.2.mlp.down_proj"
    tensors = TENSORS | {f"{draft}.weight": torch.ones(256, 384).bfloat16()}
    last = pinned(last=1)
    found = exported(model(tmp_path / "in", tensors), tmp_path / "out", last)
    assert {draft, "model.layers.1.mlp.down_proj"} < set(found["ignored_layers"])
    assert read(tmp_path / "out")[f"{draft}.weight"].dtype == torch.bfloat16


def test_draft_experts_in_one_tensor_stay_in_bf16(tmp_path):
    """Under the name of all experts of the layer; experts of the model are not listed with them."""
    draft = "mtp.layers.0.mlp.experts"
    tensors = weights(ModelSpec.of(MOE).names) | {
        f"{draft}.{leaf}": torch.ones(3, 256, 256).bfloat16()
        for leaf in ("gate_up_proj", "down_proj")
    }
    tensors |= {f"{draft.removesuffix('experts')}gate.weight": torch.ones(3, 256).bfloat16()}
    found = exported(model(tmp_path / "in", tensors, **MOE), tmp_path / "out")
    assert [n for n in found["ignored_layers"] if n.endswith(".experts")] == [draft]
    assert "mtp.layers.0.mlp.gate" in found["ignored_layers"]
    assert read(tmp_path / "out")[f"{draft}.down_proj"].dtype == torch.bfloat16


def test_tokenizer_comes_along_and_other_weights_do_not(dense, tmp_path):
    for name in ("pytorch_model.bin", "consolidated.pth", ".gitattributes", RECIPE_FILE):
        (dense / name).write_text("{}")
    (dense / "trainer").mkdir()
    (dense / "modeling_own.py").write_text("")
    exported(dense, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "modeling_own.py",
        "tokenizer.json",
    }


# KV scales


def scale_file(folder: Path, scales: dict | str, suffix: str = ".json") -> Path:
    file = folder / f"scales{suffix}"
    if suffix == ".json":
        file.write_text(scales if isinstance(scales, str) else json.dumps(scales))
    else:
        save_file({name: torch.tensor([value]) for name, value in scales.items()}, file)
    return file


@pytest.mark.parametrize("where", ["checkpoint", ".json", ".safetensors"])
def test_kv_scales_have_the_names_that_stock_engines_map(tmp_path, where):
    """``.self_attn.k_scale`` becomes ``.self_attn.attn.k_scale`` in vLLM and in SGLang; queries too
    have to come without ``.attn``, because older ones would add a second."""
    tensors = dict(TENSORS)
    if where == "checkpoint":
        tensors |= {name: torch.tensor([value]) for name, value in SCALES.items()}
    checkpoint = model(tmp_path / "in", tensors)
    file = None if where == "checkpoint" else scale_file(tmp_path, SCALES, where)
    exported(checkpoint, tmp_path / "out", Recipe(), kv_scales=file)
    found = {n: t for n, t in read(tmp_path / "out").items() if re.search(r"\.[qkv]_scale$", n)}
    assert {name: t.item() for name, t in found.items()} == {
        name.replace(".attn.", "."): value for name, value in SCALES.items()
    }
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


@pytest.mark.parametrize(
    ("scales", "match"),
    [
        ({"model.layers.0.k": 1.0}, "'model.layers.0.k' is no KV scale; names look like"),
        ({"model.layers.2.self_attn.k_scale": 1.0}, "layers.2.self_attn.k_scale' belongs to no"),
        ({**SCALES, "model.layers.1.self_attn.v_scale": 0.0}, "layers.1.self_attn.v_scale' is 0"),
        ({**SCALES, "model.layers.1.self_attn.v_scale": "x"}, "v_scale' is 'x'; write a number"),
        ({k: v for k, v in SCALES.items() if "1.self_attn.v" not in k}, "no KV scale 'model.lay"),
        ({}, "calibrate_kv_scales with --kv-scales, or set kv_cache.dtype to auto"),
        ([], "is no JSON object"),
        ({**SCALES, "model.layers.0.self_attn.k_scale": 1}, "is 1; write a number with a point, "),
        (
            {**SCALES, "model.layers.1.self_attn.attn.v_scale": 9.0},
            "are both the v scale of layer 1",
        ),
        (
            '{"model.layers.0.self_attn.k_scale": 1.0, "model.layers.0.self_attn.k_scale": 2.0}',
            "twice",
        ),
        ('{"model.layers.0.self_attn.k_scale": NaN}', "k_scale' is nan; it must be positive"),
        ("[" * 200 + "]" * 200, "nested too deeply"),
    ],
)
def test_bad_kv_scales(dense, tmp_path, scales, match):
    with pytest.raises(ScaleError, match=match):
        plan_export(dense, Recipe(), kv_scales=scale_file(tmp_path, scales))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mtp.layers.0.self_attn.k_scale", 9.0, "mtp.layers.0.*' is stored beside the weights"),
        ("model.layers.0.self_attn.k_proj.k_scale", 9.0, "k_proj.k_scale' is stored beside"),
        ("model.layers.0.self_attn.attn.k_scale", 9.0, "are both the k scale of layer 0; keep one"),
        ("model.layers.7.self_attn.k_scale", 9.0, "layers.7.*' belongs to no layer of the model"),
    ],
)
def test_stored_kv_scales_of_similar_names(tmp_path, name, value, message):
    """Each of them replaced the scale of layer 0, or would do so in vLLM, which maps such names."""
    tensors = dict(TENSORS)
    tensors |= {name: torch.tensor([value]) for name, value in SCALES.items()}
    checkpoint = model(tmp_path / "in", tensors | {name: torch.tensor([value])})
    refused(checkpoint, Fp8RLError, message, Recipe())


def test_a_kv_scale_of_any_size_is_not_read(tmp_path, monkeypatch):
    tensors = TENSORS | {name: torch.ones(8) for name in SCALES}
    monkeypatch.setattr(WeightFile, "read", lambda *_: pytest.fail("a tensor was read"))
    refused(model(tmp_path / "in", tensors), ScaleError, r"_scale' has shape \(8,\)", Recipe())
    file = tmp_path / "scales.safetensors"
    save_file({"model.layers.0.self_attn.k_scale": torch.ones(9)}, file)
    with pytest.raises(ScaleError, match=r"k_scale' has shape \(9,\); store one value"):
        plan_export(tmp_path / "in", Recipe(), kv_scales=file)


def test_unreadable_kv_scales(dense, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for name, text in (
        *(("none.json", None), ("pipe.json", None)),
        *(("torn.json", "{"), ("torn.safetensors", "{")),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ScaleError, match=f"cannot be read from '.*{name}'"):
            plan_export(dense, Recipe(), kv_scales=tmp_path / name)


@pytest.mark.parametrize("dtype", ["auto", "int8_per_token_head"])
def test_a_cache_without_scales_asks_for_none(dense, tmp_path, dtype):
    plan_export(dense, Recipe(kv_cache=KVCache(dtype=dtype)))


def test_a_cache_of_latents_has_no_scales(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSpec, "refused", lambda spec, **sides: None)
    config = {"model_type": "deepseek_v3", "kv_lora_rank": 256, "n_routed_experts": None}
    checkpoint = model(tmp_path / "in", weights(ModelSpec.of(CONFIG | config).names), **config)
    refused(checkpoint, UnsupportedError, "caches latents.*kv_cache.dtype to auto", Recipe())
    found = exported(checkpoint, tmp_path / "out")
    assert "model.layers.0.self_attn.kv_b_proj" in found["ignored_layers"]


def test_a_language_model_under_a_wrapper(tmp_path, monkeypatch):
    """Its names have the wrapper's prefix; towers and linear attention's narrow parts are BF16."""
    monkeypatch.setattr(ModelSpec, "refused", lambda spec, **sides: None)
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "vocab_size": 32}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    tower = "model.visual.blocks.0.attn.qkv"
    names = [tower, *(name for name in ModelSpec.of(config).names if name != "model.visual")]
    checkpoint = model(tmp_path / "in", weights(names), **config)
    file = scale_file(tmp_path, {f"model.layers.3.self_attn.{r}_scale": 0.5 for r in "kv"})
    found = exported(checkpoint, tmp_path / "out", Recipe(), kv_scales=file)
    tensors, prefix = read(tmp_path / "out"), "model.language_model.layers"
    assert {name for name in tensors if name.endswith(("k_scale", "v_scale"))} == {
        f"{prefix}.3.self_attn.{role}_scale" for role in "kv"
    }
    ignored = set(found["ignored_layers"])
    assert {tower, "lm_head"} < ignored
    for leaf in ("in_proj_a", "in_proj_b", "in_proj_ba"):
        assert f"{prefix}.0.linear_attn.{leaf}" in ignored
    for name in (f"{prefix}.0.linear_attn.in_proj_qkv", f"{prefix}.3.self_attn.q_proj"):
        assert name not in ignored
        assert tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn
    refused(
        checkpoint,
        ScaleError,
        r"no KV scale 'model.language_model.layers.3.self_attn.k_scale'",
        Recipe(),
    )


# quantization_config


def sglang_config(config: dict) -> tuple[str, list[int], set[str]]:
    """Method, block and ignored layers as SGLang reads them.

    ``Fp8Config.from_config`` of python/sglang/srt/layers/quantization/fp8.py, commit
    00563d368df9673403eacead4adf45ef77ef0ca9: keys ``quant_method``, ``activation_scheme``, the
    first of ``ignored_layers`` and ``modules_to_not_convert`` that is there, each name with and
    without ``model.``, and ``weight_block_size``.
    """
    assert config["activation_scheme"] == "dynamic"
    named = next(config[key] for key in ("ignored_layers", "modules_to_not_convert"))
    bare = {name.removeprefix("model.") for name in named}
    return config["quant_method"], config["weight_block_size"], bare | {f"model.{n}" for n in bare}


def _whole(prefix: str, ignored: set[str]) -> bool:
    return prefix in ignored


def _boundary(prefix: str, ignored: set[str]) -> bool:
    return any(f".{each}." in f".{prefix}." for each in ignored)


def _substring(prefix: str, ignored: set[str]) -> bool:
    return any(each in prefix for each in ignored)


def _transformers(prefix: str, ignored: set[str]) -> bool:
    return any(re.match(each, prefix) or prefix.endswith(each) for each in ignored)


@pytest.mark.parametrize("matches", [_whole, _boundary, _substring, _transformers])
@pytest.mark.parametrize(
    "pins",
    [
        Pins(),
        Pins(first=1),
        Pins(layers=(1,)),
        Pins(kinds=("down_proj",)),
        Pins(kinds=("experts",)),
    ],
    ids=["none", "first", "layer", "kind", "experts"],
)
def test_every_engine_finds_the_same_modules_in_bf16(tmp_path, pins, matches):
    """Releases of SGLang compare whole names, parts between dots, or any part (is_layer_skipped of
    python/sglang/srt/layers/quantization/utils.py, commit 006d0961 and later), transformers the
    start (should_convert_module). With 12 layers a short name must not match a longer number."""
    config = MOE | {"num_hidden_layers": 12, "mlp_only_layers": [*range(0, 12, 2)]}
    names = ModelSpec.of(config).names
    checkpoint = model(tmp_path / "in", weights(names), **config)
    plan = plan_export(checkpoint, NO_KV.model_copy(update={"pins": pins}))
    method, block, ignored = sglang_config(plan.quantization_config())
    assert (method, block) == ("fp8", [128, 128])
    for name in names:
        leaf = name.split(".")[-1]
        if leaf == "embed_tokens" or leaf.endswith("norm"):
            continue
        fp8 = bool(plan.parts(f"{name}.weight"))
        if ".experts." in name:
            assert matches(name.partition(".experts.")[0] + ".experts", ignored) != fp8
            continue
        assert matches(name, ignored) != fp8, name
        for fused, part in (("qkv_proj", "q_proj"), ("gate_up_proj", "up_proj")):
            if leaf == part:
                assert matches(name.removesuffix(leaf) + fused, ignored) != fp8


def test_both_spellings_and_the_recipe(dense, tmp_path):
    recipe = pinned(names=("*.1.mlp.down_proj",))
    found = exported(dense, tmp_path / "out", recipe)
    assert found["ignored_layers"] == found["modules_to_not_convert"]
    assert set(found["ignored_layers"]) == {"lm_head", "model.layers.1.mlp.down_proj"}
    assert Recipe.from_dict(found["recipe"]) == recipe
    assert "scale_fmt" not in found


def test_powers_of_two_are_said(dense, tmp_path):
    """``scale_fmt`` is how vLLM and SGLang learn that activations too have powers of two."""
    pow2 = {"scale_format": "pow2"}
    both = Recipe.from_dict({"weights": pow2, "activations": pow2, "kv_cache": {"dtype": "auto"}})
    assert exported(dense, tmp_path / "out", both)["scale_fmt"] == "ue8m0"
    one = Recipe.from_dict({"weights": pow2, "kv_cache": {"dtype": "auto"}})
    assert "scale_fmt" not in exported(dense, tmp_path / "other", one)


def test_a_tied_output_projection_is_left_alone(tmp_path):
    names = [name for name in ModelSpec.dense(2).names if name != "lm_head"]
    checkpoint = model(tmp_path / "in", weights(names), tie_word_embeddings=True)
    assert exported(checkpoint, tmp_path / "out")["ignored_layers"] == ["lm_head"]


# What is refused


def refused(folder: Path, error: type[Fp8RLError], match: str, recipe: Recipe = NO_KV) -> None:
    with pytest.raises(error, match=match):
        plan_export(folder, recipe)


def without(name: str) -> dict[str, torch.Tensor]:
    return {n: tensor for n, tensor in TENSORS.items() if n != name}


DOWN, O_PROJ = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"
OF_EXPERTS = {"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 256, 384).bfloat16()}
NOTHING_FITS = {
    n: t[:, :500].contiguous() if "o_proj" in n else t
    for n, t in weights(DENSE, 320, q_proj=100, gate_proj=100, up_proj=100).items()
}
STORED = (  # the first stood in the place of the computed ones
    f"{DOWN}_scale_inv",
    DOWN.replace(".weight", ".weight_scale"),
    DOWN.replace(".weight", ".input_scale"),
    "model.layers.1.mlp.experts.down_proj_scale_inv",
    "model.layers.0.self_attn.k_proj.output_scale",
)
BAD_MODELS: list[tuple[dict[str, torch.Tensor], dict, type[Fp8RLError], str]] = [
    *(
        (TENSORS, config, UnsupportedError, match)
        for config, match in (
            ({"kv_lora_rank": 512}, "multi-latent attention.*give a model that FP8 rollouts serve"),
            ({"vision_config": {}}, "a multimodal model"),
            ({"model_type": "x", "num_local_experts": 8}, "an MoE model"),
            ({"model_type": "apertus"}, "a dense model .'apertus'. of an unknown family; give a m"),
        )
    ),
    *(
        (tensors, {}, UnsupportedError, match)
        for tensors, match in (
            (
                weights(DENSE, k_proj=192),
                r"k_proj.weight' have 192 rows, .*'qkv_proj'; .*{kinds: .qkv_proj.}",
            ),
            (weights(DENSE, gate_proj=320, up_proj=320), "320 columns, no multiple of 128"),
            (weights(DENSE, 320), "_proj.weight' and 7 more have 320 columns, no multiple of 128"),
            (NOTHING_FITS, "which leaves no weight for FP8: serve this model in BF16"),
            (
                TENSORS | {DOWN: TENSORS[DOWN].to(torch.float8_e4m3fn)},
                f"'{DOWN}' has dtype F8_E4M3; FP8 is made of BF16",
            ),
            (
                TENSORS | {DOWN: TENSORS[DOWN][None]},
                f"'{DOWN}' has shape .1, 256, 384., no matrix",
            ),
        )
    ),
    *(
        (TENSORS | {name: torch.full((1,), 7.0)}, {}, UnsupportedError,
         f"'{re.escape(name)}' is stored beside the weights, as in a quantized model; give the")
        for name in STORED
    ),
    (without(O_PROJ), {}, ModelError, f"has no tensor '{O_PROJ}', which its config.json says"),
    (TENSORS, {"quantization_config": {"quant_method": "fp8"}}, ModelError, "quantized already"),
    (TENSORS, {"num_hidden_layers": None}, ModelError, "num_hidden_layers is None"),
    (OF_MOE | OF_EXPERTS, MOE, UnsupportedError, "hold one weight; store it once"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "error", "match"), BAD_MODELS)
def test_a_model_that_is_not_served(tmp_path, tensors, config, error, match):
    refused(model(tmp_path / "in", tensors, **config), error, match)


def test_a_family_without_a_gate_is_served(tmp_path):
    """Where the table lacks a type it counted as Llama: "download the model again"."""
    config = {"model_type": "arcee"}
    tensors = weights([n for n in ModelSpec.of(CONFIG | config).names if "gate_proj" not in n])
    written = exported(model(tmp_path / "in", tensors, **config), tmp_path / "out")
    assert "model.layers.0.mlp.up_proj" not in written["ignored_layers"]


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ([], ModelError, "is no folder"),
        (["other"], ModelError, "has no model.safetensors; give the folder of a Hugging Face"),
        *(
            (files, UnsupportedError, match)
            for files, match in (
                (["policy/weights/iter_0000010/metadata.json"], "convert_megatron_to_hf.py of NeM"),
                (["iter_0000010/metadata.json"], "a checkpoint of Megatron, which only Megatron r"),
                (["latest_checkpointed_iteration.txt"], "a checkpoint of Megatron"),
                (["policy/weights/model/__0_0.distcp"], "convert_dcp_to_hf.py .*save_consolidated"),
                (["__0_0.distcp", ".metadata"], "distributed checkpoint of PyTorch"),
                (["pytorch_model.bin", "config.json"], "torch.save; write them as safetensors"),
                (["adapter_config.json", "adapter_model.safetensors"], "LoRA adapter without its"),
            )
        ),
    ],
)
def test_checkpoints_of_other_kinds_say_how_to_convert(tmp_path, files, error, match):
    for name in files:
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    refused(tmp_path / "in", error, match)


def test_the_folder_of_a_run_names_its_newest_checkpoint(tmp_path):
    for step in ("step-000002", "step-000010"):
        model(tmp_path / "run" / step, TENSORS)
    refused(tmp_path / "run", ModelError, "give one of them, such as '.*step-000010'")


def test_rows_of_a_matrix_of_its_own_may_end_in_a_part_of_a_block(tmp_path):
    exported(model(tmp_path / "in", weights(DENSE, o_proj=320)), tmp_path / "out")
    assert read(tmp_path / "out")["model.layers.0.self_attn.o_proj.weight_scale_inv"].shape[0] == 3


def test_pins_of_some_experts_or_of_nothing(tmp_path, dense):
    some = pinned(names=("*.0.mlp.experts.1.*",))
    match = "part of 'model.layers.0.mlp.experts' in BF16"
    refused(model(tmp_path / "in", OF_MOE, **MOE), UnsupportedError, match, some)
    refused(dense, PinError, "layers: 7", pinned(layers=(7,)))
    refused(dense, OptionError, "rollout: false", NO_KV.model_copy(update={"rollout": False}))


Change = Callable[[Path], object]
INDEX = "model.safetensors.index.json"


def indexed(name: str, file: str | None) -> Change:
    """Name another file for a tensor; ``{}`` is the folder."""

    def change(folder: Path) -> None:
        table = json.loads((folder / INDEX).read_text())["weight_map"]
        table[name] = file and file.format(folder)
        kept = {name: file for name, file in table.items() if file}
        (folder / INDEX).write_text(json.dumps({"weight_map": kept}))

    return change


def linked(name: str, target: str = "../secret") -> Change:
    """Put a link in the place of a file, whose content the secret beside the folder has then."""

    def change(folder: Path) -> None:
        file = folder / name
        (folder.parent / "secret").write_bytes(file.read_bytes() if file.exists() else b"secret")
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    return change


def piped(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


PARTS = ("part-0.safetensors", "part-1.safetensors")
BAD_FOLDERS: list[tuple[Change, str]] = [
    *(
        (indexed(DOWN, file), "names '.*', which is no name of a file in its folder")
        for file in ("../in/part-1.safetensors", "{}/part-1.safetensors", "a/b", "..", "x/")
    ),
    # Without an index such files are no model, so it is no remedy to remove it.
    (indexed(DOWN, None), f"holds '{DOWN}', against what .*; download the model again, or write"),
    (indexed("x.k_scale", PARTS[1]), r"part-1.safetensors' lacks 'x.k_scale'"),
    (indexed(K0, PARTS[1]), f"lacks '{K0}', against what"),
    *(
        (linked(name), f"links that lead out of it, .*: '{name} -> .*/secret'; copy what belongs")
        for name in ("tokenizer.json", PARTS[0], "config.json", "notes.txt")
    ),
    (
        linked("vocab.json", "nowhere"),
        r"vocab.json' cannot be read \(No such file or dir.*; put the",
    ),
    *(
        (piped(name), f"{name}' is a pipe, a device or a socket, no regular file")
        for name in ("vocab.json", PARTS[0], INDEX, "config.json")
    ),
    (lambda folder: os.truncate(folder / PARTS[1], 1000), "part-1.safetensors' is no whole safet"),
    (lambda folder: (folder / PARTS[0]).replace(folder / PARTS[1]), "names 'part-0.*which is not"),
    (
        lambda folder: (folder / "config.json").write_text('{"model_type": "x", "model_type": ""}'),
        "config.json.model_type' is given twice",
    ),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
]


@pytest.mark.parametrize(("change", "match"), BAD_FOLDERS)
def test_a_damaged_folder(tmp_path, change, match):
    folder = model(tmp_path / "in", TENSORS, files=2)
    change(folder)
    refused(folder, ModelError, match)


def test_a_snapshot_of_a_hub_cache(dense, tmp_path):
    """Its files are links to blobs of the repository, and both may be reached by a link."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    (repository / "blobs").symlink_to("../disk")
    for number, file in enumerate(sorted(dense.iterdir())):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    exported(tmp_path / "link", tmp_path / "out")
    copy = tmp_path / "out" / "tokenizer.json"
    assert not copy.is_symlink() and copy.read_text() == "{}"
    (snapshot / "vocab.json").symlink_to("../../refs")
    (repository / "refs").write_text("")
    refused(snapshot, ModelError, "links that lead out of it, and not into its Hugging Face cache")


def test_all_problems_are_named_at_once_and_the_remedies_work(tmp_path):
    """One by one they cost a run each, and pins of a part of a fused module are refused."""
    tensors = weights(DENSE, k_proj=192, gate_proj=320, up_proj=320)
    extra = {f"{name}_scale_inv": torch.ones(1) for name in list(tensors)}
    for name in list(tensors):
        if ".0.self_attn.o_proj" in name:
            del tensors[name]
    checkpoint = model(tmp_path / "in", tensors | extra)
    (checkpoint / "notes.txt").symlink_to("/etc/hostname")
    with pytest.raises(ModelError) as caught:
        plan_export(checkpoint, Recipe())
    message = str(caught.value)
    for words in (
        "cannot be exported, for 5 reasons: (1) ",
        "notes.txt -> ",
        f" and {len(extra) - 3} more are stored beside the weights",
        "there is no KV scale 'model.layers.0.self_attn.k_scale', ",
        "' and 1 more; give a file of vllm_fp8rl.calibration",
        "gate_proj.weight' have 320 rows",
        "k_proj.weight' have 192 rows",
        "has no tensor 'model.layers.0.self_attn.o_proj.weight'",
    ):
        assert words in message
    assert len(message) < 2500
    (checkpoint / "notes.txt").unlink()
    save_file(
        weights(DENSE, k_proj=192, gate_proj=320, up_proj=320),
        checkpoint / "model.safetensors",
    )
    pins = yaml.safe_load(re.search(r"in BF16: (\{.*?\})", message)[1])
    recipe = pinned(**pins)
    found = exported(checkpoint, tmp_path / "out", recipe)
    assert "model.layers.0.self_attn.qkv_proj" in found["ignored_layers"]
    assert "model.layers.0.self_attn.o_proj" not in found["ignored_layers"]


def test_pins_for_some_layers_alone(tmp_path):
    tensors = TENSORS | weights(["model.layers.1.mlp.down_proj"], 256, gate_proj=320)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:500]
    checkpoint = model(tmp_path / "in", tensors)
    with pytest.raises(UnsupportedError) as caught:
        plan_export(checkpoint, NO_KV)
    pins = yaml.safe_load(re.search(r"in BF16: (\{.*?\})", str(caught.value))[1])
    block = "model.layers.0.self_attn"
    qkv = [f"{block}.{leaf}_proj" for leaf in "qkv"]
    assert pins == {"names": [*qkv, "model.layers.1.mlp.down_proj"]}
    exported(checkpoint, tmp_path / "out", pinned(**pins))


@pytest.mark.parametrize("key", ["num_hidden_layers", "model_type", "text_config", "layer_types"])
@pytest.mark.parametrize(
    "value", [None, [], [None], {}, {"a": [None]}, "x", True, -1, 1.5, float("nan"), 10**30]
)
def test_a_hostile_config(tmp_path, key, value):
    """An error that names file and key, or a model all the same."""
    checkpoint = model(tmp_path / "in", TENSORS, **{key: value})
    for look in (lambda: plan_export(checkpoint, NO_KV), lambda: folder_module_names(checkpoint)):
        try:
            look()
        except Fp8RLError as error:
            assert "config.json" in str(error) or str(checkpoint) in str(error)
            assert key in str(error) or "num_hidden_layers" in str(error) or "family" in str(error)


# What stays when it breaks off


def rewritten(file: Path) -> None:
    data = file.read_bytes()
    with file.open("r+b") as out:
        out.write(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.mark.parametrize("change", [rewritten, cut, replaced, Path.unlink])
@pytest.mark.parametrize(
    "name", ["part-0.safetensors", "part-1.safetensors", "config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("when", ["before", "first", "last"])
def test_a_source_that_changes_is_never_a_mixture(tmp_path, change, name, when):
    """Between the checks and the first tensor, after it, and after the last one."""
    checkpoint = model(tmp_path / "in", TENSORS, files=2)
    plan, seen = plan_export(checkpoint, NO_KV), []
    if when == "before":
        change(checkpoint / name)

    def progress(tensor: str) -> None:
        seen.append(tensor)
        if len(seen) == {"first": 1, "last": plan.tensors}.get(when):
            change(checkpoint / name)

    with pytest.raises(ModelError, match=rf"{name}' was (changed|cut off) while it was read"):
        write_export(plan, tmp_path / "out", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


CUT = """
import os, sys
from pathlib import Path
from fp8rl import Recipe
from fp8rl.errors import ModelError
from fp8rl.export import plan_export, write_export
from fp8rl.recipe import KVCache
checkpoint, out = map(Path, sys.argv[1:])
plan = plan_export(checkpoint, Recipe(kv_cache=KVCache(dtype="auto")))
cut = lambda tensor: os.truncate(checkpoint / "model.safetensors", 4096)
try:
    write_export(plan, out, progress=cut)
except ModelError as error:
    print(error)
"""


def test_a_source_that_is_cut_off_ends_no_process(dense, tmp_path):
    """Mapped memory behind the end of a file is a SIGBUS, which nobody can catch."""
    done = run_code(CUT, dense, tmp_path / "out", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors' was cut off while it was read" in done.stdout


def test_exports_of_one_process_id_do_not_meet(dense, tmp_path, monkeypatch):
    """Containers on a shared file system: the second one leaves the first one's files alone."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    plan, ended = plan_export(dense, NO_KV), []

    def second(tensor: str) -> None:
        if not ended:
            ended.append(tensor)
            with pytest.raises(KeyboardInterrupt):
                write_export(plan, tmp_path / "out", progress=interrupt)

    def interrupt(tensor: str) -> None:
        raise KeyboardInterrupt

    write_export(plan, tmp_path / "out", progress=second, shard_bytes=1)
    assert ended and len(read(tmp_path / "out")) == len(read(dense)) + 14
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


def test_the_first_of_two_exports_stays(dense, tmp_path):
    plan, ended = plan_export(dense, NO_KV), []

    def other(tensor: str) -> None:
        if not ended:
            ended.append(tensor)
            write_export(plan, tmp_path / "out")

    with pytest.raises(OptionError, match="out' exists; give a folder that does not"):
        write_export(plan, tmp_path / "out", progress=other)
    assert len(read(tmp_path / "out")) == len(read(dense)) + 14
    mode = (tmp_path / "out").stat().st_mode & 0o777
    assert mode == (tmp_path / "dense").stat().st_mode & 0o777


def test_an_existing_folder_stays(dense, tmp_path):
    plan = plan_export(dense, NO_KV)
    for out in (tmp_path / "empty", tmp_path / "link"):
        if out.name == "empty":
            out.mkdir()
        else:
            out.symlink_to(tmp_path / "nowhere")
        with pytest.raises(OptionError, match=f"'{out}' exists; give a folder that does not"):
            write_export(plan, out)
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_is_named_and_nothing_stays(tmp_path, value):
    norm = TENSORS["model.norm.weight"].index_fill(0, torch.tensor([3]), value)
    checkpoint = model(tmp_path / "in", TENSORS | {"model.norm.weight": norm})
    with pytest.raises(ModelError, match=r"'model.norm.weight' in .* has NaN or infinite values"):
        exported(checkpoint, tmp_path / "out", shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_place_that_cannot_be_written(dense, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"out' cannot be written \(File exists\)"):
        exported(dense, tmp_path / "file" / "out")


# The command


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FP8RL_RECIPE", raising=False)


def run(*words: object):
    app = cli.build_app(PluginManager(discover=False))
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_the_recipe_of_the_checkpoint_is_taken(dense, tmp_path, monkeypatch):
    """A recipe on the command line comes first, then the checkpoint's, then the environment's."""
    monkeypatch.setenv("FP8RL_RECIPE", json.dumps({"kv_cache": {"dtype": "auto"}}))
    app = PluginManager()  # the corrector of the recipe is a plugin's

    def last_is_pinned(out: str, *words: str) -> bool:
        result = CliRunner().invoke(
            cli.build_app(app), ["export", str(dense), str(tmp_path / out), *words]
        )
        assert result.exit_code == 0, result.output
        return "model.layers.1.mlp.down_proj.weight_scale_inv" not in read(tmp_path / out)

    assert not last_is_pinned("a")
    recipe = pinned(last=1).to_dict()
    (dense / RECIPE_FILE).write_text(json.dumps(recipe))
    assert last_is_pinned("b")
    assert not last_is_pinned("c", "--recipe", json.dumps(NO_KV.to_dict()))


def test_the_config_of_a_run_is_a_recipe(dense, tmp_path):
    file = tmp_path / "run.yaml"
    block = "grpo: {}\nfp8rl: {kv_cache: {dtype: auto}}"
    keys = "fp8rl: '${fp8rl}', num_last_layers_in_bf16: 1"  # the second is upstream's
    loss = "loss_fn: {fp8rl: '${fp8rl}'}"
    file.write_text(f"{block}\n{loss}\npolicy: {{generation: {{vllm_cfg: {{{keys}}}}}}}\n")
    app = cli.build_app(PluginManager())
    words = ["export", str(dense), str(tmp_path / "out"), "--config", str(file)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"Recipe: {file}" in result.output
    assert "7 of 14 linear modules in FP8" in result.output
    assert "model.layers.1.mlp.down_proj.weight_scale_inv" not in read(tmp_path / "out")
    file.write_text("grpo: {}\npolicy: {generation: {vllm_cfg: {}}}\n")
    result = CliRunner().invoke(app, [*words[:2], str(tmp_path / "b"), *words[3:]])
    assert "has no 'policy.generation.vllm_cfg.fp8rl'" in str(result.exception)


def test_options_that_exclude_each_other(dense, tmp_path):
    result = run(dense, tmp_path / "out", "--recipe", "{}", "--config", "x.yaml")
    assert isinstance(result.exception, OptionError)
    assert "not both" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta"])
def test_a_device_that_cannot_be_used_is_refused_at_the_start(dense, tmp_path, device):
    result = run(dense, tmp_path / "out", "--recipe", "{}", "--device", device)
    assert isinstance(result.exception, OptionError)
    assert re.search(rf"--device {device} cannot be used \(.+\); give cpu", str(result.exception))
    assert not result.output
    assert not (tmp_path / "out").exists()


def test_no_engine_is_imported(dense, tmp_path):
    recipe = json.dumps(NO_KV.to_dict())
    code = f"""
import sys
from fp8rl.cli import main
sys.argv = ["fp8rl", "export", {str(dense)!r}, {str(tmp_path / "out")!r}, "--recipe", {recipe!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("vllm", "megatron", "transformers", "ray") if name in sys.modules])
"""
    assert run_code(code, timeout=120).stdout.strip().endswith("[]")
    with safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sys.byteorder == "little"
