"""``fp8rl export``: what is written, what is refused, and what stays when it breaks off."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fp8rl import PluginManager, Recipe, cli
from fp8rl.errors import Fp8RLError, ModelError, OptionError, PinError, ScaleError, UnsupportedError
from fp8rl.export import plan_export, write_export
from fp8rl.models.folder import RECIPE_FILE, folder_tensors
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache, Pins
from support.model_folders import CONFIG, model, read, weights
from support.numeric import same_codes

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


def test_weights_are_the_codes_of_the_numeric_contract(tmp_path):
    """What those are in float64: ``numerics/test_quantize.py``; 320 rows end within a block."""
    names = [name for name in DENSE if name != "lm_head"]
    dense = model(tmp_path / "in", weights(names, o_proj=320), tie_word_embeddings=True)
    recipe = Recipe.from_dict(NO_KV.to_dict() | {"weights": {"scale_format": "pow2"}})
    assert exported(dense, tmp_path / "out", recipe)["ignored_layers"] == ["lm_head"]
    source, found = read(dense), read(tmp_path / "out")
    fp8 = [name for name in found if found[name].dtype == torch.float8_e4m3fn]
    assert len(fp8) == 14
    for name in fp8:
        expected = quantize_block(source[name], scale_format="pow2")
        assert same_codes((found[name], found[f"{name}_scale_inv"]), expected), name


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


def test_files_are_small_and_the_index_is_right(tmp_path):
    """None above the limit unless one tensor is; the codes are those of a single file."""
    checkpoint = model(tmp_path / "in", TENSORS, files=3)
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
    with safe_open(written[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_of_all_experts_are_split(tmp_path):
    """transformers 5 may hold the experts of a layer in two tensors; engines load them by one."""
    fused = {name: tensor for name, tensor in OF_MOE.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([OF_MOE[f"{prefix}.{n}.{leaf}_proj.weight"] for n in range(3)])
            for leaf in ("gate", "up", "down")
        )
        fused |= {
            f"{prefix}.gate_up_proj": torch.cat([gates, ups], 1),
            f"{prefix}.down_proj": downs,
        }
    exported(model(tmp_path / "in", OF_MOE, **MOE), tmp_path / "one")
    exported(model(tmp_path / "fused", fused, **MOE), tmp_path / "all")
    one, together = read(tmp_path / "one"), read(tmp_path / "all")
    assert_equal(one, together)
    wrong = model(tmp_path / "wrong", fused, **MOE | {"num_experts": 4})
    with pytest.raises(UnsupportedError, match=r"experts.* has shape .*, which does not hold"):
        plan_export(wrong, NO_KV)


def test_draft_layers_stay_in_bf16(tmp_path):
    """Under the name of all experts of the layer; experts of the model are not listed with them."""
    draft = "mtp.layers.0.mlp.experts"
    tensors = OF_MOE | {
        f"{draft}.down_proj": torch.ones(3, 256, 256).bfloat16(),
        "model.layers.2.mlp.down_proj.weight": torch.ones(256, 384).bfloat16(),
    }
    found = exported(model(tmp_path / "in", tensors, **MOE), tmp_path / "out")
    assert [n for n in found["ignored_layers"] if n.endswith(".experts")] == [draft]
    assert "model.layers.2.mlp.down_proj" in found["ignored_layers"]
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
        ("{", "cannot be read from '.*scales.json'"),
        ({"model.layers.2.self_attn.k_scale": 1.0}, "layers.2.self_attn.k_scale' belongs to no"),
        ({**SCALES, "model.layers.1.self_attn.v_scale": 0.0}, "layers.1.self_attn.v_scale' is 0"),
        ({k: v for k, v in SCALES.items() if "1.self_attn.v" not in k}, "no KV scale 'model.lay"),
        ({}, "calibrate_kv_scales with --kv-scales, or set kv_cache.dtype to auto"),
        ([], "is no JSON object"),
        ({**SCALES, "model.layers.0.self_attn.k_scale": 1}, "is 1; write a number with a point, "),
        (
            {**SCALES, "model.layers.1.self_attn.attn.v_scale": 9.0},
            "are both the v scale of layer 1",
        ),
        ('{"model.layers.0.self_attn.k_scale": NaN}', "k_scale' is nan; it must be positive"),
    ],
)
def test_bad_kv_scales(dense, tmp_path, scales, match):
    with pytest.raises(ScaleError, match=match):
        plan_export(dense, Recipe(), kv_scales=scale_file(tmp_path, scales))


def test_a_cache_of_latents_has_no_scales(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSpec, "refused", lambda spec, **sides: None)
    config = {"model_type": "deepseek_v3", "kv_lora_rank": 256, "n_routed_experts": None}
    checkpoint = model(tmp_path / "in", weights(ModelSpec.of(CONFIG | config).names), **config)
    with pytest.raises(UnsupportedError, match=r"caches latents.*kv_cache.dtype to auto"):
        plan_export(checkpoint, Recipe())
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


# quantization_config


MATCHES: tuple[Callable[[str, set[str]], bool], ...] = (
    lambda name, ignored: name in ignored,
    lambda name, ignored: any(f".{each}." in f".{name}." for each in ignored),
    lambda name, ignored: any(each in name for each in ignored),
    lambda name, ignored: any(re.match(each, name) or name.endswith(each) for each in ignored),
)
"""Whole names, parts between dots, or any part: releases of SGLang (is_layer_skipped of
python/sglang/srt/layers/quantization/utils.py, commit 006d0961 and later); the start: transformers
(should_convert_module)."""


@pytest.mark.parametrize("pins", [Pins(layers=(1,)), Pins(kinds=("down_proj", "experts"))], ids=str)
def test_every_engine_finds_the_same_modules_in_bf16(tmp_path, pins):
    """With 12 layers a short name must not match a longer number.

    SGLang takes each name with and without ``model.`` (``Fp8Config.from_config`` of
    python/sglang/srt/layers/quantization/fp8.py, commit 00563d368df9673403eacead4adf45ef77ef0ca9).
    """
    layers = MOE | {"num_hidden_layers": 12, "mlp_only_layers": [*range(0, 12, 2)]}
    names = ModelSpec.of(layers).names
    checkpoint = model(tmp_path / "in", weights(names), **layers)
    plan = plan_export(checkpoint, NO_KV.model_copy(update={"pins": pins}))
    config = plan.quantization_config()
    assert config["weight_block_size"] == [128, 128]
    assert (config["quant_method"], config["activation_scheme"]) == ("fp8", "dynamic")
    bare = {name.removeprefix("model.") for name in config["ignored_layers"]}
    ignored = bare | {f"model.{name}" for name in bare}
    for name, matches in product(names, MATCHES):
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


def test_both_spellings_the_recipe_and_powers_of_two(dense, tmp_path):
    """``scale_fmt`` is how vLLM and SGLang learn that activations too have powers of two."""
    pow2 = {"weights": {"scale_format": "pow2"}}
    for number, more in enumerate(({}, pow2, pow2 | {"activations": {"scale_format": "pow2"}})):
        values = pinned(names=("*.1.mlp.down_proj",)).to_dict() | more
        found = exported(dense, tmp_path / str(number), Recipe.from_dict(values))
        assert found["ignored_layers"] == found["modules_to_not_convert"]
        assert set(found["ignored_layers"]) == {"lm_head", "model.layers.1.mlp.down_proj"}
        assert found["recipe"] == Recipe.from_dict(values).to_dict()
        assert found.get("scale_fmt") == ("ue8m0" if number == 2 else None)


# What is refused


Make = Callable[[Path], object]
DOWN, O_PROJ = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"
INDEX, PARTS = "model.safetensors.index.json", ("part-0.safetensors", "part-1.safetensors")
NARROW = {
    n: t[:, :500].contiguous() if "o_proj" in n else t
    for n, t in weights(DENSE, 320, q_proj=100, gate_proj=100, up_proj=100).items()
}


def checkpoint(tensors: dict[str, torch.Tensor] = TENSORS, **config: object) -> Make:
    return lambda folder: model(folder, tensors, **config)


def beside(name: str, size: float = 9.0) -> Make:
    """A tensor beside weights and KV scales."""
    scales = {name: torch.tensor([value]) for name, value in SCALES.items()}
    return checkpoint(TENSORS | scales | {name: torch.tensor([size])})


def holding(*names: str) -> Make:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    return make


def changed(change: Make) -> Make:
    return lambda folder: change(model(folder, TENSORS, files=2))


def indexed(name: str, file: str | None) -> Make:
    """Name another file for a tensor."""

    def change(folder: Path) -> None:
        table = json.loads((folder / INDEX).read_text())["weight_map"]
        table[name] = file
        kept = {name: file for name, file in table.items() if file}
        (folder / INDEX).write_text(json.dumps({"weight_map": kept}))

    return changed(change)


def linked(name: str) -> Make:
    """A link in the place of a file to a secret beside the folder with its content."""

    def change(folder: Path) -> None:
        file = folder / name
        (folder.parent / "secret").write_bytes(file.read_bytes() if file.exists() else b"secret")
        file.unlink(missing_ok=True)
        file.symlink_to("../secret")

    return changed(change)


UNSUPPORTED: list[tuple[Make, str]] = [
    (checkpoint(kv_lora_rank=512), "multi-latent attention.*give a model that FP8 rollouts serve"),
    (
        checkpoint(weights(DENSE, k_proj=192)),
        r"k_proj.weight' have 192 rows, .*'qkv_proj'; .*{kinds: .qkv_proj.}",
    ),
    (checkpoint(weights(DENSE, 320)), "_proj.weight' and 7 more have 320 columns, no multiple of"),
    (checkpoint(NARROW), "which leaves no weight for FP8: serve this model in BF16"),
    (
        checkpoint(TENSORS | {DOWN: TENSORS[DOWN].to(torch.float8_e4m3fn)}),
        f"'{DOWN}' has dtype F8_E4M3; FP8 is made of BF16",
    ),
    (
        checkpoint(TENSORS | {f"{DOWN}_scale_inv": torch.full((1,), 7.0)}),
        f"'{DOWN}_scale_inv' is stored beside the weights, as in a quantized model; give the",
    ),
    (
        checkpoint(
            OF_MOE | {"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 256, 384).bfloat16()},
            **MOE,
        ),
        "hold one weight; store it once",
    ),
    (holding("policy/weights/iter_0000010/metadata.json"), "convert_megatron_to_hf.py of NeMo"),
    (holding("latest_checkpointed_iteration.txt"), "a checkpoint of Megatron, which only Megatron"),
    (holding("policy/weights/model/__0_0.distcp"), "convert_dcp_to_hf.py .*save_consolidated"),
    (holding("pytorch_model.bin", "config.json"), "torch.save; write them as safetensors"),
    (holding("adapter_config.json", "adapter_model.safetensors"), "LoRA adapter without its"),
]
BAD_FOLDERS: list[tuple[Make, str]] = [
    (lambda folder: None, "is no folder"),
    (holding("other"), "has no model.safetensors; give the folder of a Hugging Face"),
    (
        lambda folder: [model(folder / f"step-0000{n}", TENSORS) for n in ("02", "10")],
        "give one of them, such as '.*step-000010'",
    ),
    (
        checkpoint({n: t for n, t in TENSORS.items() if n != O_PROJ}),
        f"has no tensor '{O_PROJ}', which its config.json says",
    ),
    (checkpoint(quantization_config={"quant_method": "fp8"}), "quantized already"),
    (checkpoint(num_hidden_layers=None), "num_hidden_layers is None"),
    (indexed(DOWN, "../in/part-1.safetensors"), "names '.*', which is no name of a file in its f"),
    # Without an index such files are no model, so it is no remedy to remove it.
    (indexed(DOWN, None), f"holds '{DOWN}', against what .*; download the model again, or write"),
    (indexed(K0, PARTS[1]), f"part-1.safetensors' lacks '{K0}', against what"),
    *(
        (linked(name), f"links that lead out of it, .*: '{name} -> .*/secret'; copy what belongs")
        for name in (PARTS[0], "notes.txt")
    ),
    (
        changed(lambda f: os.mkfifo(f / "vocab.json")),
        "vocab.json' is a pipe, a device or a socket, no regular file",
    ),
    (changed(lambda f: os.truncate(f / PARTS[1], 1000)), "part-1.safetensors' is no whole safet"),
    (changed(lambda f: (f / "config.json").unlink()), "has no config.json"),
]
OTHERS: list[tuple[Make, str, type[Fp8RLError], Recipe]] = [
    (
        checkpoint(OF_MOE, **MOE),
        "part of 'model.layers.0.mlp.experts' in BF16",
        UnsupportedError,
        pinned(names=("*.0.mlp.experts.1.*",)),
    ),
    (checkpoint(), "layers: 7", PinError, pinned(layers=(7,))),
    (checkpoint(), "rollout: false", OptionError, NO_KV.model_copy(update={"rollout": False})),
    (checkpoint(TENSORS | {K0: torch.ones(8)}), r"_scale' has shape \(8,\)", ScaleError, Recipe()),
    # Each of these names replaced the scale of layer 0, or would do so in vLLM.
    (beside("mtp.layers.0.self_attn.k_scale"), "mtp.*beside the", UnsupportedError, Recipe()),
    (
        beside("model.layers.0.self_attn.attn.k_scale"),
        "are both the k scale of layer 0; keep one",
        ScaleError,
        Recipe(),
    ),
]


@pytest.mark.parametrize(
    ("make", "match", "error", "recipe"),
    [
        *((*row, UnsupportedError, NO_KV) for row in UNSUPPORTED),
        *((*row, ModelError, NO_KV) for row in BAD_FOLDERS),
        *OTHERS,
    ],
)
def test_refused(tmp_path, make, match, error, recipe):
    make(tmp_path / "in")
    with pytest.raises(error, match=match):
        plan_export(tmp_path / "in", recipe)


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


def test_all_problems_are_named_at_once_and_the_remedies_work(tmp_path):
    """One by one they cost a run each, and pins of a part of a fused module are refused."""
    tensors = weights(DENSE, k_proj=192, gate_proj=320, up_proj=320)
    extra = {f"{name}_scale_inv": torch.ones(1) for name in tensors}
    checkpoint = model(tmp_path / "in", tensors | extra)
    with pytest.raises(UnsupportedError) as caught:
        plan_export(checkpoint, Recipe())
    message = str(caught.value)
    for words in (
        "cannot be exported, for 3 reasons: (1) ",
        f" and {len(extra) - 3} more are stored beside the weights",
        "there is no KV scale 'model.layers.0.self_attn.k_scale', ",
        "k_proj.weight' have 192 rows",
    ):
        assert words in message
    assert len(message) < 2500
    save_file(tensors, checkpoint / "model.safetensors")
    pins = yaml.safe_load(re.search(r"in BF16: (\{.*?\})", message)[1])
    found = exported(checkpoint, tmp_path / "out", pinned(**pins))
    assert "model.layers.0.self_attn.qkv_proj" in found["ignored_layers"]
    assert "model.layers.0.self_attn.o_proj" not in found["ignored_layers"]


# What stays when it breaks off


def rewritten(file: Path) -> None:
    data = file.read_bytes()
    with file.open("r+b") as out:
        out.write(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


@pytest.mark.parametrize(
    ("change", "name", "when"),
    [
        (rewritten, "part-0.safetensors", "before"),
        (rewritten, "part-1.safetensors", "first"),
        (lambda file: os.truncate(file, 100), "config.json", "first"),
        (Path.unlink, "part-0.safetensors", "last"),
    ],
)
def test_a_source_that_changes_is_never_a_mixture(tmp_path, change, name, when):
    """Before the first tensor is read, after it, or after the last; ``tests/fuzz``: anywhere."""
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


def test_what_is_in_the_place_stays(dense, tmp_path):
    """A folder, and the first of two exports that write there at once."""
    plan, ended = plan_export(dense, NO_KV), []
    (tmp_path / "empty").mkdir()

    def other(tensor: str) -> None:
        if not ended:
            ended.append(tensor)
            write_export(plan, tmp_path / "out")

    for name in ("empty", "out"):
        out = tmp_path / name
        with pytest.raises(OptionError, match=f"'{out}' exists; give a folder that does not"):
            write_export(plan, out, progress=other)
    assert not any((tmp_path / "empty").iterdir())
    assert len(read(tmp_path / "out")) == len(read(dense)) + 14


def test_a_bad_value_is_named_and_nothing_stays(tmp_path):
    norm = TENSORS["model.norm.weight"].index_fill(0, torch.tensor([3]), torch.nan)
    checkpoint = model(tmp_path / "in", TENSORS | {"model.norm.weight": norm})
    with pytest.raises(ModelError, match=r"'model.norm.weight' in .* has NaN or infinite values"):
        exported(checkpoint, tmp_path / "out", shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# The command


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FP8RL_RECIPE", raising=False)


def run(dense: Path, out: Path, *words: object):
    arguments = ["export", str(dense), str(out), *map(str, words)]
    return CliRunner().invoke(cli.build_app(PluginManager()), arguments)


def pins_last(*arguments: object) -> bool:
    assert run(*arguments).exit_code == 0
    return "model.layers.1.mlp.down_proj.weight_scale_inv" not in read(arguments[1])


def test_the_recipe_of_the_checkpoint_is_taken(dense, tmp_path, monkeypatch):
    """A recipe on the command line comes first, then the checkpoint's, then the environment's."""
    monkeypatch.setenv("FP8RL_RECIPE", json.dumps({"kv_cache": {"dtype": "auto"}}))
    assert not pins_last(dense, tmp_path / "a")
    (dense / RECIPE_FILE).write_text(json.dumps(pinned(last=1).to_dict()))
    assert pins_last(dense, tmp_path / "b")
    assert not pins_last(dense, tmp_path / "c", "--recipe", json.dumps(NO_KV.to_dict()))


def test_the_config_of_a_run_is_a_recipe(dense, tmp_path):
    file = tmp_path / "run.yaml"
    block = "grpo: {}\nfp8rl: {kv_cache: {dtype: auto}}"
    keys = "fp8rl: '${fp8rl}', num_last_layers_in_bf16: 1"  # the second is upstream's
    loss = "loss_fn: {fp8rl: '${fp8rl}'}"
    file.write_text(f"{block}\n{loss}\npolicy: {{generation: {{vllm_cfg: {{{keys}}}}}}}\n")
    result = run(dense, tmp_path / "out", "--config", file)
    assert f"Recipe: {file}" in result.output
    assert "7 of 14 linear modules in FP8" in result.output
    assert "model.layers.1.mlp.down_proj.weight_scale_inv" not in read(tmp_path / "out")
    file.write_text("grpo: {}\npolicy: {generation: {vllm_cfg: {}}}\n")
    result = run(dense, tmp_path / "b", "--config", file)
    assert "has no 'policy.generation.vllm_cfg.fp8rl'" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--config", "x.yaml"), "not both"),
        (("--device", "meta"), r"--device meta cannot be used \(.+\); give cpu"),
    ],
)
def test_options_are_refused_at_the_start(dense, tmp_path, words, match):
    result = run(dense, tmp_path / "out", "--recipe", "{}", *words)
    assert isinstance(result.exception, OptionError) and not result.output
    assert re.search(match, str(result.exception)) and not (tmp_path / "out").exists()
