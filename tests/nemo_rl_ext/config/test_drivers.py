"""What each of NeMo RL's drivers serves, and that no key of ours is ignored anywhere else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError, RecipeError, UnsupportedError
from nemo_rl_ext.config.drivers import (
    DRIVERS,
    DTENSOR,
    FSDP,
    Driver,
    check_places,
    driver_of,
    meant,
)
from nemo_rl_ext.config.keys import READERS
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.patch_finder import PATCHES, PatchFinder
from nemo_rl_ext.patches import config as config_patch
from support.nemo_rl import MasterConfig, put
from support.processes import run_code

ALL = [pytest.param(driver, id=driver.name) for driver in DRIVERS.values()]


def config(block: dict[str, Any] | None, *sections: str) -> dict[str, Any]:
    """A config with a place for every wrong guess, and the block in ``sections``."""
    value: dict[str, Any] = {"loss_fn": {"use_importance_sampling_correction": True}}
    for model in ("policy", "value", "teacher", "env.reward_model"):
        put(value, model, {"model_name": "/none", "megatron_cfg": {"enabled": True}, "draft": {}})
    value["teachers"] = [copy.deepcopy(value["teacher"]) for _ in range(2)]
    for path in (
        *("policy.generation.vllm_kwargs.additional_config", "policy.generation.vllm_cfg"),
        *("policy.dtensor_cfg", "policy.megatron_cfg.model_overrides", "data.train", "logger"),
    ):
        put(value, path, {})
    for section in sections:
        put(value, f"{section}.fp8rl", block)
    return value


def mappings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path of every mapping."""
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield from mappings(inner, (*path, str(key)))


def test_a_config_tells_its_driver_by_its_sections() -> None:
    for driver in DRIVERS.values():
        assert driver_of({"policy": {}, driver.section: {}}) is driver
    assert driver_of({"grpo": {}, "async_rl": {}}) is DRIVERS["single_controller"]
    assert driver_of({"grpo": {}, "async_rl": None}) is DRIVERS["grpo"]
    assert driver_of({"policy": {}}) is None


def made(driver: Driver, value: dict[str, Any]) -> Any:
    """A ``MasterConfig`` as the driver's script makes it, with the patch applied."""

    class Own(MasterConfig):
        pass

    Own.__qualname__ = "MasterConfig"  # a class of a function is read in its source
    module: Any = ModuleType(driver.module)
    module.MasterConfig = Own
    config_patch.apply(module, PatchFinder())
    return module.MasterConfig(**copy.deepcopy(value))


# --- places ---


@pytest.mark.parametrize("driver", ALL)
def test_a_block_is_read_or_refused_wherever_it_stands(driver: Driver) -> None:
    """Naively, `MasterConfig` takes any of them without a word."""
    block = {"kv_cache": {"dtype": "auto"}}
    served = set()
    for path in mappings(config(None)):
        value = config(None)
        key = ".".join([*path, "fp8rl"])
        put(value, key, block)
        assert MasterConfig(**value), "upstream's own class says nothing"
        try:
            read_keys = made(driver, value)
        except RecipeError as error:
            assert f"'{key}'" in str(error).replace("[", ".").replace("]", ""), key
        else:
            assert read_keys.model_dump()
            served.add(key)
    # The config has a Megatron trainer.
    assert served == {f"{section}.fp8rl" for section in driver.serves if section not in FSDP}


@pytest.mark.parametrize(
    "name", ["fp8lr", "policy.megatron_cfg.fp8rl", "fp8rl_cfg", "nemo_fp8rl_recipe", "fp8rl_gard"]
)
def test_what_is_nearly_our_key_is_refused_everywhere(name: str) -> None:
    ours = "fp8rl_guard" if name == "fp8rl_gard" else "fp8rl"
    for path in mappings(config(None)):
        value: Any = config(None)
        inner = value
        for part in path:
            inner = inner[int(part)] if part.isdigit() else inner[part]
        inner[name] = {}
        with pytest.raises(RecipeError, match=f"is no key of NeMo RL or fp8rl; write '{ours}'"):
            made(DRIVERS["grpo"], value)
    for other in ("FP8RL_AUTOLOAD", "FP8RL_RECIPE", "fp8", "fp8_cfg", "fp8_recipe"):
        assert meant(other) is None, "a variable of ours, or a key of upstream's"


TRAINER, ROLLOUTS = "policy.megatron_cfg.fp8rl", "policy.generation.vllm_cfg.fp8rl"
BY_DTENSOR = {"policy.megatron_cfg.enabled": False}
HIGH = {"importance_sampling": {"high": 3.0}}
TO_FP8 = {"training": True, "kv_cache": {"dtype": "auto"}}
NOT_BY_DTENSOR = "'policy.megatron_cfg.enabled' true"


@pytest.mark.parametrize(
    ("driver", "keys", "message"),
    [
        ("sft", {ROLLOUTS: {}}, "run_sft.py: it generates nothing, and its loss compares no two "),
        ("dpo", {"loss_fn.fp8rl_guard": {}}, "'loss_fn.fp8rl_guard' has no effect in run_dpo.py"),
        ("distillation", {"teacher.megatron_cfg.fp8rl": {}}, "the teacher stays in BF16"),
        (
            "distillation",
            {"teachers.1.megatron_cfg.fp8rl": {}},
            "'teachers[1].megatron_cfg.fp8rl' has no effect",
        ),
        ("ppo", {"value.megatron_cfg.fp8rl": {}}, "the value model stays in BF16; move it to"),
        ("grpo", {f"{DTENSOR}.fp8rl": {}}, "is true; move it to 'policy.megatron_cfg.fp8rl', or"),
        ("grpo", {f"{section}.fp8rl": {} for section in FSDP}, "are one section, before NeMo RL"),
        ("ppo", {f"{DTENSOR}.fp8rl": {}}, "'policy.dtensor_cfg.fp8rl' has no effect in run_ppo.py"),
        ("grpo", {"policy.draft.fp8rl": {}}, "'policy.draft.fp8rl' has no effect"),
        ("grpo", {"loss_fn.fp8rl_guard": {}}, "fp8rl_guard' is set, but no section uses it"),
        (
            "sft",
            {TRAINER: {"pins": {"first": 1}}, "fp8rl": {"pins": {"first": 2}}},
            "'fp8rl' differs from 'policy.megatron_cfg.fp8rl'",
        ),
        # Settings that nobody acts on.
        ("sft", {TRAINER: {"rollout": True}}, "rollout' has no effect: run_sft"),
        ("dpo", {TRAINER: {"kv_cache": {"margin": 2.0}}}, "kv_cache' has no effect"),
        ("grpo", {TRAINER: {"rollout": True}}, "rollout' has no effect: 'policy.generation.vllm_c"),
        ("grpo", {"loss_fn.fp8rl": {"pins": {"first": 1}}}, "pins' has no effect"),
        ("distillation", {ROLLOUTS: HIGH}, "no effect: run_distillation.py has no use for it"),
        ("sft", {TRAINER: {}, **BY_DTENSOR}, NOT_BY_DTENSOR),
        ("grpo", {TRAINER: TO_FP8, ROLLOUTS: TO_FP8, **BY_DTENSOR}, "training' has no effect: D"),
    ],
)
def test_a_refusal_names_the_key_the_reason_and_the_remedy(
    driver: str, keys: dict[str, Any], message: str
) -> None:
    value = config(None)
    for path, new in keys.items():
        put(value, path, new)
    kind = UnsupportedError if message == NOT_BY_DTENSOR else RecipeError
    with pytest.raises(kind) as raised:
        made(DRIVERS[driver], value)
    assert message in str(raised.value)


@pytest.mark.parametrize("driver", ALL)
def test_without_a_key_nothing_is_changed_and_nothing_imported(driver: Driver) -> None:
    value = config(None)
    assert made(driver, value).model_dump() == MasterConfig(**value).model_dump()
    assert not check_places(value, driver)
    assert "config" in PATCHES[driver.module]


def test_the_check_of_a_config_without_keys_imports_nothing_of_ours() -> None:
    code = (
        "import sys; from nemo_rl_ext.config.drivers import DRIVERS, check_places; "
        "assert not any(check_places({'policy': {'fp8_cfg': {}}}, d) for d in DRIVERS.values()); "
        "print([m for m in ('torch', 'pydantic', 'fp8rl', 'nemo_rl_ext.config.merge') "
        "if m in sys.modules])"
    )
    done = run_code(code)
    assert done.stdout.strip() == "[]", done.stderr


# --- what is served ---


def test_supervised_training_runs_in_fp8() -> None:
    value = config({"pins": {"layers": [3]}}, "policy.megatron_cfg")
    value["policy"]["generation"] = None
    value["policy"]["megatron_cfg"]["fp8_cfg"] = {"enabled": True, "fp8_recipe": "blockwise"}
    prepared = made(DRIVERS["sft"], value)
    megatron = prepared.policy["megatron_cfg"]
    plan = RunPlan.of(prepared.policy)
    assert plan is not None and plan.of_trainer == Recipe.from_dict(
        {"pins": {"layers": [3]}, "rollout": False, "kv_cache": {"in_training": False}}
    )
    assert megatron["fp8_cfg"]["enabled"] is False, "not Transformer Engine's beside ours"
    assert plan.kv_scales is None


# --- every key of a recipe arrives ---

OTHER: dict[str, Any] = {
    "rollout": False,
    "training": False,
    "weights": {"scale_format": "pow2"},
    "activations": {"scale_format": "pow2"},
    "pins": {"layers": [-2], "last": 2, "kinds": ["o_proj"]},
    "kv_cache": {"margin": 1.5, "in_training": False},
    "importance_sampling": {
        "level": "geometric",
        "mode": "clip",
        "low": 0.5,
        "self_normalize": True,
    },
    "rope_dtype": "float32",
    "exact": True,
    "allow_untested_gpu": True,
}
POW2 = {"scale_format": "pow2"}


@pytest.mark.parametrize("driver", [driver for driver in ALL if driver.values[0].serves])
@pytest.mark.parametrize("key", OTHER)
def test_each_key_of_a_recipe_reaches_who_acts_on_it(driver: Driver, key: str) -> None:
    """NeMo RL#4126: settings that a config takes and nobody forwards to the workers."""
    assert set(READERS) == set(Recipe.model_fields) == set(OTHER)
    from vllm_fp8rl.quantization.config import read_recipe

    block = {"kv_cache": {"dtype": "auto"}} if key != "kv_cache" and driver.name == "ppo" else {}
    block[key] = OTHER[key]
    if key == "exact":
        block = {"exact": True}  # an FP8 cache belongs to it
    if key == "allow_untested_gpu":
        block |= {"training": False, "weights": POW2, "activations": POW2}
    wanted = Recipe.from_dict(block)
    try:
        prepared = made(driver, config(block, *(s for s in driver.serves if s not in FSDP)))
    except Fp8RLError as error:
        assert key in str(error)  # told, not lost
        return
    acting = [section for section in READERS[key] if section in driver.serves]
    if not acting:  # a driver without rollouts, which is what `false` asks for
        assert wanted.rollout is False
        return
    found = []
    if "policy.megatron_cfg" in acting:
        sent = pickle.loads(pickle.dumps(prepared.policy))  # as Ray does
        plan = RunPlan.of(sent)
        assert plan is not None and plan.of_trainer is not None
        found.append(plan.of_trainer)
    if "policy.generation.vllm_cfg" in acting and wanted.rollout:
        arguments = prepared.policy["generation"]["vllm_kwargs"]
        found.append(read_recipe(arguments["additional_config"]))
    if "loss_fn" in acting:
        plan = RunPlan.of(prepared.loss_fn)
        assert plan is not None
        found.append(plan.recipe)
    assert found or key == "rollout"
    for recipe in found:
        assert getattr(recipe, key) == getattr(wanted, key) != getattr(Recipe(), key)


# --- on the way to the workers ---


def test_a_block_is_a_plain_dict_to_all_who_log_or_save_it() -> None:
    import yaml

    prepared = made(DRIVERS["sft"], config({}, "policy.megatron_cfg"))
    saved = yaml.safe_load(yaml.safe_dump(prepared.model_dump()))
    assert prepared.policy["megatron_cfg"]["fp8rl"] == saved["policy"]["megatron_cfg"]["fp8rl"]
    again = made(DRIVERS["sft"], saved)  # resumed from what a checkpoint keeps
    assert again.model_dump() == prepared.model_dump()
    assert copy.deepcopy(prepared.policy) == prepared.policy
