"""``fp8rl export``: what is written, what is refused, and what stays when it breaks off."""

from __future__ import annotations

import json
import os
import re
import sys
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


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return model(tmp_path / "dense", weights(ModelSpec.dense(2).names))


def exported(checkpoint: Path, out: Path, recipe: Recipe = NO_KV, **options) -> dict:
    """Export and return the ``quantization_config``."""
    plan = plan_export(checkpoint, recipe, kv_scales=options.pop("kv_scales", None))
    write_export(plan, out, **options)
    return json.loads((out / "config.json").read_text())["quantization_config"]


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


def test_what_is_not_fp8_keeps_its_bytes(dense, tmp_path):
    exported(dense, tmp_path / "out", NO_KV.model_copy(update={"pins": Pins(last=1)}))
    source, found = read(dense), read(tmp_path / "out")
    fp8 = {name for name in found if name.endswith("_scale_inv")}
    assert len(fp8) == 7
    assert all(name.startswith("model.layers.0.") for name in fp8)
    for name, tensor in source.items():
        if f"{name}_scale_inv" not in fp8:
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("files", [1, 3])
def test_files_are_small_and_the_index_is_right(tmp_path, files):
    """More files than the source has, none above the limit unless one tensor is."""
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names), files=files)
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


def test_codes_do_not_depend_on_the_files(tmp_path):
    one = model(tmp_path / "one", weights(ModelSpec.dense(2).names))
    three = model(tmp_path / "three", weights(ModelSpec.dense(2).names), files=3)
    exported(one, tmp_path / "a")
    exported(three, tmp_path / "b", shard_bytes=100_000)
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


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
    assert one.keys() == together.keys()
    assert all(torch.equal(one[n].view(torch.uint8), together[n].view(torch.uint8)) for n in one)
    wrong = model(tmp_path / "wrong", fused, **MOE | {"num_experts": 4})
    refused(wrong, UnsupportedError, "experts.* has shape .*, which does not hold")


def test_layers_beside_the_model_stay_in_bf16(tmp_path):
    """Draft layers of multi-token prediction: no rollout of fp8rl runs them."""
    draft = "model.layers.2.mlp.down_proj"
    tensors = weights(ModelSpec.dense(2).names) | {
        f"{draft}.weight": torch.ones(256, 384).bfloat16()
    }
    last = NO_KV.model_copy(update={"pins": Pins(last=1)})
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
    tensors = weights(ModelSpec.dense(2).names)
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
            {**SCALES, "model.layers.00.self_attn.k_scale": 1.0},
            "layers.00.*' is no KV scale; names",
        ),
        ({**SCALES, "mtp.layers.0.self_attn.k_scale": 1.0}, "'mtp.layers.0.*' is no KV scale; nam"),
        (
            {**SCALES, "model.language_model.layers.0.self_attn.k_scale": 1.0},
            "language_model.*k_scale' is no KV scale; names look like",
        ),
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
        ("model.layers.00.self_attn.k_scale", 9.0, "layers.00.*' is stored beside the weights"),
        ("model.layers.0.self_attn.k_proj.k_scale", 9.0, "k_proj.k_scale' is stored beside"),
        ("model.layers.0.self_attn.attn.k_scale", 9.0, "are both the k scale of layer 0; keep one"),
        ("model.layers.7.self_attn.k_scale", 9.0, "layers.7.*' belongs to no layer of the model"),
    ],
)
def test_stored_kv_scales_of_similar_names(tmp_path, name, value, message):
    """Each of them replaced the scale of layer 0, or would do so in vLLM, which maps such names."""
    tensors = weights(ModelSpec.dense(2).names)
    tensors |= {name: torch.tensor([value]) for name, value in SCALES.items()}
    checkpoint = model(tmp_path / "in", tensors | {name: torch.tensor([value])})
    refused(checkpoint, Fp8RLError, message, Recipe())


def test_a_kv_scale_of_any_size_is_not_read(tmp_path, monkeypatch):
    tensors = weights(ModelSpec.dense(2).names) | {name: torch.ones(8) for name in SCALES}
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
    """Its names, those of KV scales too, have the wrapper's prefix; towers and the narrow parts of
    linear attention stay in BF16, and linear attention has no KV scales."""
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
    recipe = NO_KV.model_copy(update={"pins": Pins(names=("*.1.mlp.down_proj",))})
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


def test_a_type_that_the_table_lacks_is_refused_by_name(tmp_path):
    """It counted as Llama, whose gate it lacks: "download the model again"."""
    names = [
        n for n in ModelSpec.of(CONFIG | {"model_type": "arcee"}).names if "gate_proj" not in n
    ]
    unknown = model(tmp_path / "unknown", weights(names), model_type="apertus")
    refused(unknown, UnsupportedError, "a dense model .'apertus'. of an unknown family; give a mod")
    known = model(tmp_path / "known", weights(names), model_type="arcee")
    written = exported(known, tmp_path / "out")
    assert "model.layers.0.mlp.up_proj" not in written["ignored_layers"]


def test_folders_that_are_no_model(tmp_path):
    refused(tmp_path / "none", ModelError, "is no folder")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, ModelError, "has no model.safetensors; give the folder of a Hugging Face")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    refused(folder, ModelError, "has no config.json")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (["policy/weights/iter_0000010/metadata.json"], "convert_megatron_to_hf.py of NeMo RL"),
        (["iter_0000010/metadata.json"], "a checkpoint of Megatron, which only Megatron reads"),
        (["latest_checkpointed_iteration.txt"], "a checkpoint of Megatron"),
        (["policy/weights/model/__0_0.distcp"], "convert_dcp_to_hf.py .*save_consolidated"),
        (["__0_0.distcp", ".metadata"], "distributed checkpoint of PyTorch"),
        (["pytorch_model.bin", "config.json"], "torch.save; write them as safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA adapter without its base"),
    ],
)
def test_checkpoints_of_other_kinds_say_how_to_convert(tmp_path, files, match):
    for name in files:
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    refused(tmp_path / "in", UnsupportedError, match)


def test_the_folder_of_a_run_names_its_newest_checkpoint(tmp_path):
    for step in ("step-000002", "step-000010"):
        model(tmp_path / "run" / step, weights(ModelSpec.dense(2).names))
    refused(tmp_path / "run", ModelError, "give one of them, such as '.*step-000010'")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized already"),
        ({"kv_lora_rank": 512}, "multi-latent attention.*give a model that FP8 rollouts serve"),
        ({"vision_config": {}}, "a multimodal model"),
        ({"model_type": "x", "num_local_experts": 8}, "an MoE model"),
    ],
)
def test_models_that_are_not_served(tmp_path, config, match):
    refused(
        model(tmp_path / "in", weights(ModelSpec.dense(2).names), **config), UnsupportedError, match
    )


@pytest.mark.parametrize(
    ("rows", "hidden", "match"),
    [
        (
            {"k_proj": 192},
            256,
            r"k_proj.weight' have 192 rows, .*'qkv_proj'; .*{kinds: .qkv_proj.}",
        ),
        (
            {"gate_proj": 320, "up_proj": 320},
            256,
            "down_proj.weight' have 320 columns, no multiple of 128",
        ),
        ({}, 320, "_proj.weight' and 7 more have 320 columns, no multiple of 128"),
    ],
)
def test_sizes_that_stock_engines_do_not_serve(tmp_path, rows, hidden, match):
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names, hidden, **rows))
    refused(checkpoint, UnsupportedError, match)


def test_a_weight_that_is_missing(tmp_path):
    tensors = weights(ModelSpec.dense(2).names)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    match = "has no tensor 'model.layers.1.self_attn.o_proj.weight', which its config.json says"
    refused(model(tmp_path / "in", tensors), ModelError, match)
    (tmp_path / "in" / "config.json").write_text("{}")
    refused(tmp_path / "in", ModelError, "config.json' has no key 'num_hidden_layers'")


def test_a_pin_mends_a_size(tmp_path):
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names, k_proj=192))
    pinned = NO_KV.model_copy(update={"pins": Pins(kinds=("qkv_proj",))})
    found = exported(checkpoint, tmp_path / "out", pinned)
    assert "model.layers.0.self_attn.qkv_proj" in found["ignored_layers"]


def test_rows_of_a_matrix_of_its_own_may_end_in_a_part_of_a_block(tmp_path):
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names, o_proj=320))
    exported(checkpoint, tmp_path / "out")
    assert read(tmp_path / "out")["model.layers.0.self_attn.o_proj.weight_scale_inv"].shape[0] == 3


def test_other_dtypes_and_shapes(tmp_path):
    tensors = weights(ModelSpec.dense(2).names)
    name = "model.layers.1.mlp.down_proj.weight"
    codes = model(tmp_path / "codes", tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    refused(codes, UnsupportedError, f"'{name}' has dtype F8_E4M3; FP8 is made of BF16")
    cube = model(tmp_path / "cube", tensors | {name: tensors[name][None]})
    refused(cube, UnsupportedError, f"'{name}' has shape .1, 256, 384., no matrix")


def test_pins_of_some_experts_or_of_nothing(tmp_path, dense):
    moe = model(tmp_path / "in", weights(ModelSpec.of(MOE).names), **MOE)
    some = NO_KV.model_copy(update={"pins": Pins(names=("*.0.mlp.experts.1.*",))})
    refused(moe, UnsupportedError, "part of 'model.layers.0.mlp.experts' in BF16", some)
    refused(dense, PinError, "layers: 7", NO_KV.model_copy(update={"pins": Pins(layers=(7,))}))
    refused(dense, OptionError, "rollout: false", NO_KV.model_copy(update={"rollout": False}))


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{NAME}_scale_inv", (2, 3)),
        (NAME.replace(".weight", ".weight_scale"), (1,)),
        (NAME.replace(".weight", ".input_scale"), (1,)),
        ("model.layers.1.mlp.experts.down_proj_scale_inv", (2, 3)),
        ("model.layers.0.self_attn.k_proj.output_scale", (1,)),
    ],
)
def test_stored_scales_beside_bf16_weights(tmp_path, name, shape):
    """The first stood in the place of the computed ones."""
    tensors = weights(ModelSpec.dense(2).names) | {name: torch.full(shape, 7.0)}
    match = f"'{re.escape(name)}' is stored beside the weights, as in a quantized model; give the"
    refused(model(tmp_path / "in", tensors), UnsupportedError, match)


def test_a_weight_that_two_tensors_hold(tmp_path):
    tensors = weights(ModelSpec.of(MOE).names)
    fused = "model.layers.0.mlp.experts.down_proj"
    tensors[fused] = torch.zeros(3, 256, 384).bfloat16()
    match = r"experts.0.down_proj.weight' and|'model.* hold one weight; store it once"
    refused(model(tmp_path / "in", tensors, **MOE), UnsupportedError, match)


def test_an_index_that_names_other_tensors_than_its_files(tmp_path):
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names), files=2)
    index = checkpoint / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    for change, match in (
        # Without an index such files are no model, so it is no remedy to remove it.
        ({NAME: None}, f"holds '{NAME}', against what .*; download the model again, or write"),
        ({"x.k_scale": "part-1.safetensors"}, r"part-1.safetensors' lacks 'x.k_scale'"),
        (
            {"model.layers.0.self_attn.k_scale": "part-1.safetensors"},
            r"lacks 'model.layers.0.self_attn.k_scale', against what",
        ),
    ):
        changed = {name: file for name, file in (table | change).items() if file}
        index.write_text(json.dumps({"weight_map": changed}))
        refused(checkpoint, ModelError, match)


@pytest.mark.parametrize(
    "where", ["../in/part-1.safetensors", "{}/part-1.safetensors", "a/b", ".."]
)
def test_an_index_that_names_files_elsewhere(tmp_path, where):
    model(tmp_path / "other", weights(ModelSpec.dense(2).names), files=2)
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names), files=2)
    index = checkpoint / "model.safetensors.index.json"
    named = where.format(tmp_path / "other")
    index.write_text(index.read_text().replace("part-1.safetensors", named))
    refused(checkpoint, ModelError, f"names '{named}', which is no name of a file in its folder")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "model.safetensors", "config.json", "notes.txt"]
)
def test_links_to_elsewhere_are_not_followed(dense, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_bytes((dense / name).read_bytes() if (dense / name).exists() else b"secret")
    (dense / name).unlink(missing_ok=True)
    (dense / name).symlink_to("../secret")
    match = f"links that lead out of it, .*: '{name} -> {secret}'; copy what belongs"
    refused(dense, ModelError, match)


def test_links_that_lead_nowhere_and_files_that_are_none(dense):
    (dense / "vocab.json").symlink_to("nowhere")
    refused(dense, ModelError, r"vocab.json' cannot be read \(No such file or directory\); put the")
    (dense / "vocab.json").unlink()
    for name in ("vocab.json", "model.safetensors", "model.safetensors.index.json", "config.json"):
        (dense / name).unlink(missing_ok=True)
        os.mkfifo(dense / name)
        refused(dense, ModelError, f"{name}' is a pipe, a device or a socket, no regular file")


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
    tensors = weights(ModelSpec.dense(2).names, k_proj=192, gate_proj=320, up_proj=320)
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
        weights(ModelSpec.dense(2).names, k_proj=192, gate_proj=320, up_proj=320),
        checkpoint / "model.safetensors",
    )
    pins = yaml.safe_load(re.search(r"in BF16: (\{.*?\})", message)[1])
    recipe = NO_KV.model_copy(update={"pins": Pins.model_validate(pins)})
    found = exported(checkpoint, tmp_path / "out", recipe)
    assert "model.layers.0.self_attn.o_proj" not in found["ignored_layers"]


def test_pins_for_some_layers_alone(tmp_path):
    tensors = weights(ModelSpec.dense(2).names) | weights(
        ["model.layers.1.mlp.down_proj"], 256, gate_proj=320
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:500]
    checkpoint = model(tmp_path / "in", tensors)
    with pytest.raises(UnsupportedError) as caught:
        plan_export(checkpoint, NO_KV)
    pins = yaml.safe_load(re.search(r"in BF16: (\{.*?\})", str(caught.value))[1])
    block = "model.layers.0.self_attn"
    qkv = [f"{block}.{leaf}_proj" for leaf in "qkv"]
    assert pins == {"names": [*qkv, "model.layers.1.mlp.down_proj"]}
    exported(
        checkpoint, tmp_path / "out", NO_KV.model_copy(update={"pins": Pins.model_validate(pins)})
    )


def test_a_model_of_which_nothing_fits(tmp_path):
    tensors = weights(ModelSpec.dense(2).names, 320, q_proj=100, gate_proj=100, up_proj=100)
    tensors |= {n: t[:, :500].contiguous() for n, t in tensors.items() if "o_proj" in n}
    match = "which leaves no weight for FP8: serve this model in BF16"
    refused(model(tmp_path / "in", tensors), UnsupportedError, match)


@pytest.mark.parametrize("key", ["num_hidden_layers", "model_type", "text_config", "layer_types"])
@pytest.mark.parametrize(
    "value", [None, [], [None], {}, {"a": [None]}, "x", True, -1, 1.5, float("nan"), 10**30]
)
def test_a_hostile_config(tmp_path, key, value):
    """An error that names file and key, or a model all the same."""
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names), **{key: value})
    for look in (lambda: plan_export(checkpoint, NO_KV), lambda: folder_module_names(checkpoint)):
        try:
            look()
        except Fp8RLError as error:
            assert "config.json" in str(error) or str(checkpoint) in str(error)
            assert key in str(error) or "num_hidden_layers" in str(error) or "family" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "config.json' holds a list, not a JSON object"),
        (b"\xff\xfe{}", "config.json' is not UTF-8 text"),
        (
            b'{"a":' * 300 + b"1" + b"}" * 300,
            "config.json is not valid JSON: it is nested too deep",
        ),
        (b'{"model_type": "qwen3", "model_type": "x"}', r"config.json.model_type' is given twice"),
    ],
)
def test_a_config_that_is_none(dense, text, message):
    (dense / "config.json").write_bytes(text)
    refused(dense, ModelError, message)


def test_files_that_are_torn(tmp_path):
    torn = model(tmp_path / "torn", weights(ModelSpec.dense(2).names), files=2)
    file = torn / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(torn, ModelError, "part-1.safetensors' is no whole safetensors file")
    swapped = model(tmp_path / "swapped", weights(ModelSpec.dense(2).names), files=2)
    (swapped / "part-0.safetensors").replace(swapped / "part-1.safetensors")
    refused(swapped, ModelError, "names 'part-0.safetensors', which is not there")


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
    checkpoint = model(tmp_path / "in", weights(ModelSpec.dense(2).names), files=2)
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
    tensors = weights(ModelSpec.dense(2).names)
    tensors["model.norm.weight"][3] = value
    checkpoint = model(tmp_path / "in", tensors)
    with pytest.raises(ModelError, match=r"'model.norm.weight' in .* has NaN or infinite values"):
        exported(checkpoint, tmp_path / "out", shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_interrupt_leaves_nothing(dense, tmp_path):
    def interrupt(tensor: str) -> None:
        assert list(tmp_path.glob(".out.partial-*"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exported(dense, tmp_path / "out", progress=interrupt, shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


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

    def pinned(out: str, *words: str) -> bool:
        result = CliRunner().invoke(
            cli.build_app(app), ["export", str(dense), str(tmp_path / out), *words]
        )
        assert result.exit_code == 0, result.output
        return "model.layers.1.mlp.down_proj.weight_scale_inv" not in read(tmp_path / out)

    assert not pinned("a")
    recipe = NO_KV.model_copy(update={"pins": Pins(last=1)}).to_dict()
    (dense / RECIPE_FILE).write_text(json.dumps(recipe))
    assert pinned("b")
    assert not pinned("c", "--recipe", json.dumps(NO_KV.to_dict()))


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
    result = run(dense, tmp_path / "out", "--check")
    assert "--check needs vllm_fp8rl" in str(result.exception)
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
