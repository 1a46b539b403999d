"""Tell what a config will do, by the functions with which NeMo RL's driver reads and checks it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8rl import PinPolicy, Recipe
from fp8rl.errors import ModelError, OptionError, RecipeError, UnsupportedError
from fp8rl.models.folder import folder_config
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, Section
from fp8rl.precision_report import precision_section
from fp8rl.recipe import KVDtype
from nemo_rl_ext.config.drivers import BLOCK, FSDP, MEGATRON, VLLM, find
from nemo_rl_ext.config.keys import Sections, block_path, kv_dtype
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.model_pins import check_model, model_spec
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.config.value_kinds import SIZES, refuse_wrong_kinds
from nemo_rl_ext.doctor.config_file import load_run
from nemo_rl_ext.doctor.installation import find_package, installed_package, look_at
from nemo_rl_ext.doctor.wake_up import rollout_sizes, wake_up_section
from nemo_rl_ext.patches.upstream import KNOWN

_CACHES: dict[KVDtype, str] = {"fp8_e4m3": "FP8", "int8_per_token_head": "INT8", "auto": "BF16"}
"""Formats of a KV cache, for people."""


def diagnose() -> Diagnosis:
    """Describe the installed NeMo RL, and which patches fit it."""
    package = installed_package()
    if package is None:
        problem = (
            "NeMo RL is not installed here; run this in the environment of its driver, or give "
            "a config and --source with a checkout."
        )
        return Diagnosis(None, (KNOWN,), problems=(problem,))
    found = look_at(package)
    facts = {"patches": found.fit, "config": "not looked at; give X.yaml"}
    return Diagnosis(found.version, (KNOWN,), facts, found.problems)


def examine(request: ConfigRequest) -> Diagnosis:
    """Describe what NeMo RL would do with a config.

    Returns:
        A section per topic. What the driver would refuse is in ``problems``.
    """
    package = find_package(request.source)
    nemo_rl = look_at(package)
    config, driver = load_run(request.file)
    sections = Sections(config, driver)
    given = [path for path, _, _, value in find(config) if value is not None]
    block = _suppose_block(sections, given, request)
    folder = None if request.model is None else folder_config(request.model)
    told = ", ".join(given) or "none, so fp8rl does nothing in this run"
    if block is not None:
        places = ", ".join(map(block_path, sections.blocks))
        told += f"; what follows is for {json.dumps(block)} as {places}"
    facts = {
        "patches": nemo_rl.fit,
        "config": f"{request.file.name}, for examples/{driver.scripts[0]}",
        "fp8rl keys": told,
    }
    problems = [*nemo_rl.problems] if given or block is not None else []
    found: list[Section] = []
    notes: list[str] = []
    try:
        plan = read(sections)
        if plan is not None:
            refuse_wrong_kinds(sections, SIZES)
            model, pins = model_spec(sections.policy, folder, offline=True), None
            facts["model"] = str(sections.policy.get("model_name"))
            if request.model is not None:
                facts["model"] += f", by the config.json in {request.model}"
            elif model is None:
                facts["model"] += (
                    "; its config.json is not on this machine, give its folder with --model"
                )
            if model is not None:
                plan, pins = check_model(plan, sections.policy, model)
            notes += plan.notes
            if model is None:
                notes.append(
                    "whether the model is served and the pins fit it was not looked at, because "
                    "its config.json is not here; the driver looks."
                )
            facts |= _decisions(plan, sections)
            found += _modules(plan, sections, model, pins, request.gpu_memory, problems)
    except (ModelError, RecipeError, UnsupportedError) as error:
        problems.append(str(error))
    if notes:
        found.append(Section("notes", ("",), tuple((note,) for note in notes)))
    return Diagnosis(
        f"{nemo_rl.version}, in {package.parent}", (KNOWN,), facts, tuple(problems), tuple(found)
    )


def rollout_recipe(file: Path) -> Recipe:
    """Read the recipe of the rollouts from a config, as its driver does.

    Upstream's keys add to the block there: layers and modules in BF16, formats of scales.
    """
    plan = read(Sections(*load_run(file)))
    if plan is None or VLLM not in plan.sections:
        raise RecipeError(
            f"'{file}' has no '{block_path(VLLM)}', the recipe of its rollouts; add it, or give a "
            "recipe with --recipe."
        )
    return plan.recipe


def _suppose_block(
    sections: Sections, given: list[str], request: ConfigRequest
) -> dict[str, Any] | None:
    """Write a block where the config has none: --recipe, or what upstream's keys say.

    It stands in each section that the config has and the driver reads; but DTensor workers train
    in BF16 unless the config itself has the block there.

    Returns:
        The block; None where the config has one, or where no key asks for FP8.
    """
    if request.recipe is not None:
        if given:
            raise OptionError(
                f"'{request.file}' has a recipe at '{given[0]}', so --recipe would not be read; "
                "leave it out."
            )
        block = request.recipe.model_dump(mode="json", exclude_unset=True)
    else:
        fp8_kv = sections.vllm.get("kv_cache_dtype") in ("fp8", "fp8_e4m3")
        training = sections.at(f"{MEGATRON}.fp8_cfg").get("enabled")
        block = {
            "rollout": sections.vllm.get("precision") == "fp8",
            "training": bool(sections.megatron.get("enabled") and training),
            "kv_cache": {"dtype": "fp8_e4m3" if fp8_kv else "auto"},
        }
        if given or not (block["rollout"] or block["training"]):
            return None
    for path in sections.driver.serves:
        section: Any = sections.at(path)
        if section and path not in FSDP:
            section[BLOCK] = dict(block)
    return block


def _decisions(plan: RunPlan, sections: Sections) -> dict[str, str]:
    """Say in a line each what runs in FP8."""
    recipe = plan.recipe
    facts = {}
    if sections.generation:
        linears = "FP8 linear layers" if recipe.rollout else "BF16 linear layers"
        backend = sections.generation.get("backend", "vllm")
        facts["rollout"] = f"{linears}, {_CACHES[kv_dtype(recipe)]} KV cache; {backend}"
    if plan.kv_scales == "trainer":
        facts["KV scales"] = (
            "from the trainer's own forwards, with every refit; recalibrate: "
            f"{recipe.kv_cache.recalibrate}"
        )
    linears = "FP8 linear layers" if recipe.training else "BF16"
    trainer = "Megatron" if plan.megatron else sections.other_trainer
    facts["training"] = f"{linears}; {trainer}"
    if plan.rounded_as != "auto":
        held = _CACHES[plan.rounded_as]
        facts["training"] += f"; attends over K and V as the {held} cache holds them"
    return facts


def _modules(
    plan: RunPlan,
    sections: Sections,
    model: ModelSpec | None,
    pins: PinPolicy | None,
    gpu_memory: float | None,
    problems: list[str],
) -> list[Section]:
    """Tables of the model's modules and of vLLM's KV cache, as far as the model is known.

    What is refused is added to ``problems``.
    """
    recipe = plan.recipe
    in_fp8 = [name for name in ("rollout", "training") if getattr(recipe, name)]
    # Without FP8 nothing is refused, but the memory of such a model may be unknown.
    unknown = not in_fp8 and model is not None and model.refused(rollout=True, training=False)
    if model is None or pins is None or unknown:
        return []
    rows = pins.report()
    found = []
    if in_fp8:
        title = f"precision of each module in {' and '.join(in_fp8)}"
        found.append(precision_section(rows, title))
    if sections.vllm and sections.generation.get("backend", "vllm") == "vllm":
        served = rows if recipe.rollout else [replace(row, precision="bf16") for row in rows]
        if why_not := rollout_sizes(sections, model).split_problem():
            problems.append(f"'{VLLM}.tensor_parallel_size': {why_not}")
        else:
            found.append(wake_up_section(sections, model, served, gpu_memory))
    return found
