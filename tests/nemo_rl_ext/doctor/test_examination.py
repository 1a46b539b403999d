"""``fp8rl doctor nemo-rl``; the checkout is a stand-in (tests/contract has the real one)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl import cli
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis
from fp8rl.recipe import Recipe
from nemo_rl_ext.doctor import examination, installation
from nemo_rl_ext.doctor.examination import diagnose, examine
from support.nemo_rl import put, write_checkout

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
VLLM, MEGATRON = "policy.generation.vllm_cfg", "policy.megatron_cfg"
PLACES = (f"{VLLM}.fp8rl", f"{MEGATRON}.fp8rl", "loss_fn.fp8rl")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def config(block: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """A Megatron GRPO config with upstream's FP8; overrides are dotted paths with ``__``."""
    vllm = {"precision": "fp8", "tensor_parallel_size": 2, "num_last_layers_in_bf16": 1}
    value: dict[str, Any] = {
        "grpo": {"val_at_start": False},
        "loss_fn": {"use_importance_sampling_correction": True},
        "policy": {
            "model_name": "some/model",
            "generation": {"vllm_cfg": {**vllm, "gpu_memory_utilization": 0.5}},
            "megatron_cfg": {"enabled": True, "fp8_cfg": {"enabled": True}},
        },
        "cluster": {"num_nodes": 1, "gpus_per_node": 8},
    }
    for path in PLACES if block is not None else ():
        put(value, path, block)
    for path, new in overrides.items():
        put(value, path.replace("__", "."), new)
    return value


@pytest.fixture
def look(tmp_path: Path, source: Path, model: Path) -> Any:
    """Examine a config as a file; the diagnosis."""

    def look(value: dict[str, Any], **request: Any) -> Diagnosis:
        file = tmp_path / "x.yaml"
        file.write_text(yaml.safe_dump(value), encoding="utf-8")
        return examine(ConfigRequest(file, **{"source": source, "model": model, **request}))

    return look


def rows(diagnosis: Diagnosis, title: str) -> dict[str, tuple[str, ...]]:
    (section,) = (s for s in diagnosis.sections if s.title.startswith(title))
    return {row[0]: row[1:] for row in section.rows}


def titles(diagnosis: Diagnosis) -> list[str]:
    return [section.title for section in diagnosis.sections]


def test_a_config_with_the_block(look: Any, source: Path) -> None:
    found = look(config({"pins": {"first": 2}}, loss_fn__fp8rl_guard={"fallback": "stop"}))
    assert found.problems == ()
    assert found.installed == f"0.6.0rc1, in {source}"
    assert found.facts["config"] == "x.yaml, for examples/run_grpo.py"
    assert found.facts["fp8rl keys"] == (
        "loss_fn.fp8rl, loss_fn.fp8rl_guard, policy.generation.vllm_cfg.fp8rl, "
        "policy.megatron_cfg.fp8rl"
    )
    assert found.facts["rollout"] == "FP8 linear layers, FP8 KV cache; vllm"
    assert found.facts["KV scales"] == (
        "from the trainer's own forwards, with every refit; recalibrate: refit"
    )
    assert found.facts["training"] == (
        "FP8 linear layers; Megatron; attends over K and V as the FP8 cache holds them"
    )
    layers = rows(found, "precision of each module in rollout and training")
    assert layers["2"] == ("qkv_proj, o_proj, gate_up_proj, down_proj", "")
    assert layers["0-1"][0] == layers["3"][0] == ""
    assert "(last: 1)" in layers["3"][1]
    assert titles(found)[1] == "KV cache when vLLM wakes up"
    assert found.facts["patches"] == "9 of 9 fit"


def test_without_keys_it_supposes_a_block_that_asks_for_the_same(look: Any) -> None:
    found = look(config(), gpu_memory=1.0)
    assert found.problems == ()
    assert found.facts["fp8rl keys"] == (
        "none, so fp8rl does nothing in this run; what follows is for "
        '{"rollout": true, "training": true, "kv_cache": {"dtype": "auto"}} as ' + ", ".join(PLACES)
    )
    assert found.facts["rollout"].startswith("FP8 linear layers, BF16 KV cache")
    assert rows(found, "KV cache when vLLM wakes up")["free on a GPU"]


def test_a_bf16_config_runs_as_ever(look: Any) -> None:
    value = config(**{f"{VLLM}.precision": "bfloat16", f"{MEGATRON}.fp8_cfg.enabled": False})
    found = look(value)
    assert found.problems == ()
    assert found.facts["fp8rl keys"] == "none, so fp8rl does nothing in this run"
    assert titles(found) == []
    found = look(value, recipe=Recipe.from_dict({"pins": {"layers": [0]}}))
    assert '{"pins": {"layers": [0]}} as policy' in found.facts["fp8rl keys"]
    assert rows(found, "precision of each module in rollout and training")["0"][0] == ""


def test_a_dtensor_trainer_and_gpus_of_its_own(look: Any) -> None:
    block = {"kv_cache": {"dtype": "fp8_e4m3"}}
    value = config(block)
    value["policy"]["megatron_cfg"] = {"enabled": False}
    del value["loss_fn"]["fp8rl"]
    resources = {"num_nodes": 1, "gpus_per_node": 2}
    put(value, "policy.generation.colocated", {"enabled": False, "resources": resources})
    found = look(value)
    assert found.problems == ()
    assert found.facts["training"] == "BF16; DTensor"
    assert "KV scales" not in found.facts
    notes = [row[0] for row in found.sections[-1].rows]
    assert notes[:2] == [
        "the DTensor trainer runs in BF16; only the rollouts run in FP8.",
        "no KV scales are sent; vLLM calibrates them itself after each refit.",
    ]
    put(value, "policy.dtensor_cfg", {"fp8rl": block, "_v2": False})
    found = look(value)
    assert found.problems == ()
    assert found.facts["training"] == (
        "FP8 linear layers; DTensor; attends over K and V as the FP8 cache holds them"
    )
    assert found.facts["KV scales"].startswith("from the trainer's own forwards")


def test_a_driver_that_generates_nothing(look: Any) -> None:
    value = config()
    value["sft"] = value.pop("grpo")
    del value["policy"]["generation"], value["loss_fn"]
    found = look(value)
    assert found.facts["config"].endswith("examples/run_sft.py")
    assert "rollout" not in found.facts
    assert found.facts["training"] == "FP8 linear layers; Megatron"
    assert not [title for title in titles(found) if "rollout" in title or "vLLM" in title]


NUMBER, TP = "must be a whole number of at least 1, not", f"{VLLM}.tensor_parallel_size"


@pytest.mark.parametrize(
    ("block", "overrides", "message"),
    [
        ({"pins": {"layers": [9]}}, {}, f"{VLLM}.fp8rl.pins.layers: 9 matches nothing"),
        ({}, {TP: 3}, "tensor_parallel_size': tensor parallel size 3"),
        ({}, {"data.fp8rl": {}}, "'data.fp8rl' has no effect in run_grpo.py"),
        (None, {f"{VLLM}.is_mx": True}, f"'{VLLM}.is_mx' is true, which asks for MXFP8"),
        # Values that nothing can be computed with.
        ({}, {"cluster.num_nodes": "two"}, f"num_nodes' {NUMBER} 'two'; wr"),
    ],
)
def test_what_no_run_starts_with_is_a_problem(
    block: dict[str, Any] | None, overrides: dict[str, Any], message: str, look: Any
) -> None:
    problems = look(config(block, **overrides)).problems
    assert any(message in problem for problem in problems), problems
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"vision_config": {}, "text_config": MODEL},
            "does not serve 'some/model', a multimodal model",
        ),
        (
            {"model_type": "minimax_m2", "num_local_experts": 4},
            "FP8 training does not serve experts named w1, w2 and w3",
        ),
    ],
)
def test_a_model_that_is_not_served(
    change: dict[str, Any], problem: str, look: Any, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | change))
    (found,) = look(config({"kv_cache": {"dtype": "auto"}})).problems
    assert problem in found


def test_a_model_that_is_not_here(look: Any) -> None:
    found = look(config({"pins": {"kinds": ["o_proj"]}}), model=None)
    assert found.problems == ()
    assert found.facts["model"] == (
        "some/model; its config.json is not on this machine, give its folder with --model"
    )
    assert "config.json is not here; the driver looks" in found.sections[-1].rows[0][0]


def test_a_patch_that_does_not_fit(look: Any, tmp_path: Path) -> None:
    changed = write_checkout(tmp_path / "changed")
    file = changed / "nemo_rl" / "models" / "policy" / "lm_policy.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("def train(self", "def train_all(self"), encoding="utf-8")
    (problem,) = look(config({}), source=changed).problems
    assert problem.startswith(
        "Patch 'skip_step' does not fit this NeMo RL: nemo_rl.models.policy.lm_policy.Policy.train "
        "does not exist"
    )
    assert problem.endswith(
        "This NeMo RL is 0.6.0rc1; fp8rl serves the main branch at 7ea279a (22 August 2026): check "
        "out that commit (1 of its internals differ)."
    )


def test_the_installed_nemo_rl(source: Path, monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    for module in (installation, examination):
        monkeypatch.setattr(module, "installed_package", lambda: source / "nemo_rl")
    found = diagnose()
    assert (found.installed, found.problems) == ("0.6.0rc1", ())
    assert found.facts["patches"] == "9 of 9 fit"
    assert look(config({}), source=None).problems == ()
    monkeypatch.setattr(examination, "installed_package", lambda: None)
    assert "--source" in diagnose().problems[0]


# --- the command line ---


def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, source: Path, model: Path
) -> None:
    """Ray and NeMo RL are not needed; here they are not even there."""
    for name in ("ray", "nemo_rl"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(installation, "installed_package", lambda: None)
    for name, text in {
        "good": yaml.safe_dump(config({})),
        "refused": yaml.safe_dump(config({}, data__fp8rl={})),
        "bad": "a: [",
        "other": "policy: {}",
        "wrong": "{grpo: {}, policy: [1]}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    here = ("--source", str(source), "--model", str(model))

    def doctor(name: str, *more: str) -> tuple[int, str, str]:
        file = str(tmp_path / f"{name}.yaml")
        monkeypatch.setattr(sys, "argv", ["fp8rl", "doctor", "nemo-rl", file, *more])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    code, out, err = doctor("good", *here, "--gpu-memory", "80")
    assert (code, err) == (0, "")
    assert "KV cache when vLLM wakes up" in out and "0-2" in out
    code, out, _ = doctor("refused", *here)
    assert code == 1
    assert "Problem: 'data.fp8rl' has no effect in run_grpo.py" in out
    for name, more, message in (
        ("none", here, "none.yaml' cannot be read"),
        ("bad", here, "is not valid YAML"),
        ("other", here, "has none of the sections grpo, async_rl, ppo"),
        ("wrong", here, "'policy' is [1], not a section with keys"),
        ("good", ("--source", str(tmp_path)), "is no checkout of NeMo RL"),
        ("good", (), "NeMo RL is not installed here; run this in the environment"),
        ("good", (*here, "--recipe", "{}"), "so --recipe would not be read; leave it"),
    ):
        code, out, err = doctor(name, *more)
        assert (code, out) == (2, "")
        assert err.startswith("Error: ") and err.count("\n") == 1
        assert message in err


def test_numbers_in_quotes_are_converted_where_nemo_rl_does(look: Any) -> None:
    plain, block = config({}), {"pipeline_model_parallel_size": 1, "moe_grouped_gemm": False}
    plain["policy"]["megatron_cfg"] |= block
    quoted = json.loads(json.dumps(plain))
    quoted["policy"]["megatron_cfg"] |= {key: str(value) for key, value in block.items()}
    quoted["cluster"] = {"num_nodes": "1", "gpus_per_node": "8"}
    assert look(quoted) == look(plain)
