"""All of NeMo RL's drivers with our keys, each from its own file up to ``init_ray``."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

pytest.importorskip("nemo_rl.algorithms.grpo", exc_type=ImportError)

import ray
from nemo_rl.distributed import virtual_cluster
from nemo_rl.utils import config as nemo_config
from nemo_rl.utils.logger import flatten_dict
from omegaconf import OmegaConf
from ray import cloudpickle

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from nemo_rl_ext.__main__ import main
from nemo_rl_ext.config.drivers import AUTOMODEL, DRIVERS, Driver, find
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.patch_finder import install
from support.sources import source

install().take_up()

CONFIGS = {
    "grpo": "grpo_math_1B_megatron.yaml",
    "single_controller": "grpo_math_1B_megatron_single_controller.yaml",
    "ppo": "ppo_math_1B_megatron.yaml",
    "distillation": "distillation_math_megatron.yaml",
    "sft": "sft_openmathinstruct2_megatron.yaml",
    "dpo": "recipes/llm/dpo-llama3.1-8b-instruct-4n8g-megatron.v2.yaml",
}
BLOCK = {"kv_cache": {"dtype": "auto"}}
SCRIPTS = [
    pytest.param(driver, script, id=script)
    for driver in DRIVERS.values()
    for script in driver.scripts
]


@cache
def upstream(name: str) -> dict[str, Any]:
    """The resolved config of a driver, from upstream's own YAML by upstream's own loader."""
    nemo_config.register_omegaconf_resolvers()
    file = source("NEMO_RL_SRC") / "examples" / "configs" / CONFIGS[name]
    made: Any = OmegaConf.to_container(nemo_config.load_config(str(file)), resolve=True)
    if "use_importance_sampling_correction" in made.get("loss_fn", {}):
        made["loss_fn"]["use_importance_sampling_correction"] = True  # FP8 rollouts ask for one
    return made


def test_no_key_of_upstreams_yamls_is_taken_for_ours() -> None:
    files = sorted((source("NEMO_RL_SRC") / "examples").rglob("*.yaml"))
    assert len(files) > 100
    for file in files:
        assert not list(find(yaml.load(file.read_text("utf-8"), yaml.CSafeLoader))), file


class Reached(Exception):
    """The script has come to Ray."""


@pytest.fixture
def at_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def init_ray() -> None:
        raise Reached

    monkeypatch.setattr(virtual_cluster, "init_ray", init_ray)
    # run_grpo_nemo_gym.py raises a limit of wandb, for which a module stands in here.
    monkeypatch.setitem(sys.modules, "wandb.util", ModuleType("wandb.util"))
    monkeypatch.setattr(sys, "argv", ["test"])
    monkeypatch.setattr(sys, "path", [*sys.path])


def run(script: str, driver: Driver, sections: tuple[str, ...], folder: Path) -> None:
    """Run a script of upstream's with a YAML on top of upstream's; as the launcher does."""
    examples = source("NEMO_RL_SRC") / "examples"
    value: dict[str, Any] = {"defaults": str(examples / "configs" / CONFIGS[driver.name])}
    for section in sections:
        inner = value
        for part in section.split("."):
            inner = inner.setdefault(part, {})
        inner["fp8rl"] = BLOCK
    if "logger" in upstream(driver.name):
        value["logger"] = {"log_dir": str(folder / "logs")}
    file = folder / "config.yaml"
    file.write_text(json.dumps(value), encoding="utf-8")
    main([str(examples / script), "--config", str(file)])


@pytest.mark.usefixtures("at_ray")
@pytest.mark.parametrize(("driver", "script"), SCRIPTS)
def test_every_script_refuses_before_ray(driver: Driver, script: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"'data\.fp8rl' has no effect in run_"):
        run(script, driver, ("data",), tmp_path)
    assert not ray.is_initialized()


@pytest.mark.usefixtures("at_ray")
@pytest.mark.parametrize(("driver", "script"), [p for p in SCRIPTS if "gym" not in p.values[1]])
def test_every_script_that_serves_prepares_its_workers_config(
    driver: Driver, script: str, tmp_path: Path
) -> None:
    """The gym's scripts share the class, and load a tokenizer before they start Ray."""
    with pytest.raises(Reached) as raised:
        run(script, driver, tuple(s for s in driver.serves if s != AUTOMODEL), tmp_path)
    frames = [entry.frame for entry in raised.traceback]
    config = next(f.f_locals["config"] for f in reversed(frames) if "config" in f.f_locals)
    policy = cloudpickle.loads(cloudpickle.dumps(config.policy))  # as Ray sends it
    rollouts = "policy.generation.vllm_cfg" in driver.serves
    kv_cache = {"dtype": "auto", "in_training": False}  # no cache is in FP8
    recipe = {"kv_cache": kv_cache, "rollout": rollouts}
    megatron = policy["megatron_cfg"]
    if rollouts and megatron["enabled"] and megatron["apply_rope_fusion"]:
        recipe["rope_dtype"] = "float32"  # as TransformerEngine's fused kernel
    plan = RunPlan.of(policy)
    assert plan is not None and plan.of_trainer == Recipe.from_dict(recipe)
    assert not policy["megatron_cfg"]["fp8_cfg"]["enabled"]
    if rollouts:
        assert policy["generation"]["vllm_kwargs"]["quantization"] == "fp8rl"
    # The driver logs its config; TensorBoard takes these and no list in a list.
    ours = {k: v for k, v in flatten_dict(config.model_dump()).items() if "fp8rl" in k}
    assert all(v is None or isinstance(v, (bool, int, float, str)) for v in ours.values())
    assert not ray.is_initialized()


@pytest.mark.usefixtures("at_ray")
@pytest.mark.parametrize("key", ["policy.megatron_cfg.fp8rl.training=true", None])
def test_a_driver_of_ones_own_is_told_that_it_reads_no_key(
    key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's functions, another class for the config. Without our keys it runs."""
    from nemo_rl_ext.patches import start

    start.apply(virtual_cluster, install())  # over the fixture's
    file = source("NEMO_RL_SRC") / "examples" / "configs" / CONFIGS["sft"]
    loaded = nemo_config.load_config(str(file))
    if key is None:
        with pytest.raises(Reached):
            virtual_cluster.init_ray()
        return
    nemo_config.parse_hydra_overrides(loaded, [f"++{key}"])
    with pytest.raises(
        UnsupportedError, match=r"'policy\.megatron_cfg\.fp8rl' is not read by this"
    ):
        virtual_cluster.init_ray()
