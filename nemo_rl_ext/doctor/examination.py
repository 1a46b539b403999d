"""Tell what a config will do, by the functions with which NeMo RL's driver reads and checks it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8rl import PinPolicy, Recipe
from fp8rl.errors import ModelError, OptionError, RecipeError, UnsupportedError
from fp8rl.models.folder import folder_config
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, Section
from fp8rl.precision_report import precision_section
from nemo_rl_ext.config.drivers import BLOCK, FSDP, LOSS, MEGATRON, VLLM, find
from nemo_rl_ext.config.keys import Sections, block_path, kv_dtype
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.model_pins import check_model, model_spec
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.config.value_kinds import SIZES, refuse_wrong_kinds
from nemo_rl_ext.doctor.config_file import load_run
from nemo_rl_ext.doctor.installation import find_package, installed_package, look_at
from nemo_rl_ext.doctor.memory import CACHES, GPUs, gpus_of, rollout_section
from nemo_rl_ext.doctor.wake_up import wake_up_section
from nemo_rl_ext.patches.upstream import KNOWN

_ROLLOUT_SIZES = tuple(f"{VLLM}.{key}_parallel_size" for key in ("tensor", "pipeline"))
_TRAINING_SIZES = tuple(
    f"{MEGATRON}.{key}"
    for key in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    )
)


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
    fit = len(found.patches) - len(found.problems)
    return Diagnosis(
        found.version,
        (KNOWN,),
        {"patches": f"{fit} of {len(found.patches)} fit", "config": "not looked at; give X.yaml"},
        found.problems,
    )


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
    facts = {"config": f"{request.file.name}, for examples/{driver.scripts[0]}", "fp8rl keys": told}
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
            gpus = gpus_of(sections)
            facts |= _decisions(plan, sections, gpus)
            problems += _layout_problems(sections, gpus, model)
            found += _upstream_keys(plan, sections)
            found += _modules(plan, sections, model, pins, request.gpu_memory, problems)
    except (ModelError, RecipeError, UnsupportedError) as error:
        problems.append(str(error))
    patches = tuple(
        (patch.name, patch.purpose, "does not fit" if patch.misfits else "fits")
        for patch in nemo_rl.patches
    )
    found.append(Section("patches of this NeMo RL", ("patch", "what it changes", "state"), patches))
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
    driver = sections.driver
    if request.recipe is not None:
        if given:
            raise OptionError(
                f"'{request.file}' has a recipe at '{given[0]}', so --recipe would not be read; "
                "leave it out."
            )
        if not driver.serves:
            raise OptionError(
                f"examples/{driver.scripts[0]} has no use for --recipe "
                f"({driver.unsupported_reason}); leave it out."
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
    for path in driver.serves:
        section: Any = sections.at(path)
        if section and path not in FSDP:
            section[BLOCK] = dict(block)
    return block if driver.serves else None


def _decisions(plan: RunPlan, sections: Sections, gpus: GPUs) -> dict[str, str]:
    """Say in a line each what runs in FP8 and how the loss is corrected."""
    recipe, guard = plan.recipe, plan.guard
    facts = {}
    if sections.generation:
        linears = "FP8 linear layers" if recipe.rollout else "BF16 linear layers"
        cache = CACHES[kv_dtype(recipe)]
        backend = sections.generation.get("backend", "vllm")
        facts["rollout"] = f"{linears}, {cache} KV cache; {backend} on {_count(gpus.rollout)}"
    if plan.kv_scales == "trainer":
        facts["KV scales"] = (
            "from the trainer's own forwards, with every refit; recalibrate: "
            f"{recipe.kv_cache.recalibrate}"
        )
    linears = "FP8 linear layers" if recipe.training else "BF16"
    trainer = "Megatron" if plan.megatron else sections.other_trainer
    same = "the same " if gpus.shared and sections.generation else ""
    turns = ", in turn" if same else ""
    facts["training"] = f"{linears}; {trainer} on {same}{_count(gpus.training)}{turns}"
    if plan.rounded_as != "auto":
        held = CACHES[plan.rounded_as]
        facts["training"] += f"; attends over K and V as the {held} cache holds them"
    if LOSS in plan.sections:
        given = recipe.importance_sampling
        low = "" if given.low is None else f", low {given.low:g}"
        bounds = "" if given.mode == "off" else f"{low}, high {given.high:g}"
        rejection = "" if given.rejection is None else f"; rejection, level {given.rejection.level}"
        veto = "" if given.token_veto is None else f"; token veto {given.token_veto:g}"
        facts["importance sampling"] = (
            f"level {given.level}, mode {given.mode}{bounds}{rejection}{veto}"
        )
        facts["mismatch guard"] = "off" if guard is None else f"on, fallback {guard.fallback}"
    return facts


def _layout_problems(sections: Sections, gpus: GPUs, model: ModelSpec | None) -> list[str]:
    """Return a sentence for each engine with parallel sizes beyond its GPUs or layers.

    NeMo RL asserts the first once Ray has started. That a size divides the GPUs is left to it.
    """
    layouts: list[tuple[int, str, tuple[str, ...]]] = []
    if _has_rollouts(sections):
        layouts.append((gpus.rollout, "rollouts", _ROLLOUT_SIZES))
    if sections.megatron.get("enabled"):
        layouts.append((gpus.training, "training", _TRAINING_SIZES))
    problems = []
    for count, use, paths in layouts:
        places = (path.rpartition(".") for path in paths)
        size = math.prod(sections.at(section).get(key) or 1 for section, _, key in places)
        if count < size:
            product = " times ".join(map(repr, paths))
            problems.append(
                f"{product} is {size}, but {_count(count)} serve {use}; lower them, or correct "
                "'cluster' and 'policy.generation.colocated'."
            )
    stages = sections.megatron.get("pipeline_model_parallel_size") or 1
    if sections.megatron.get("enabled") and model is not None and stages > len(model.layers):
        problems.append(
            f"'{_TRAINING_SIZES[1]}' is {stages}, more than the model's {len(model.layers)} "
            "layers; lower it."
        )
    return problems


def _has_rollouts(sections: Sections) -> bool:
    return bool(sections.vllm) and sections.generation.get("backend", "vllm") == "vllm"


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


def _upstream_keys(plan: RunPlan, sections: Sections) -> list[Section]:
    """Table of the keys that the recipe has taken over; no table where there are none."""
    rows = []
    for path, ours in plan.taken.items():
        parent, _, key = path.rpartition(".")
        value: Any = plan.recipe.to_dict()
        for part in ours.split("."):
            value = value[part]
        became = f"{ours} takes its place" if isinstance(value, dict) else f"{ours}: {_yaml(value)}"
        rows.append((path, _yaml(sections.at(parent).get(key)), became))
    columns = ("key", "value", "becomes in the recipe")
    return [Section("NeMo RL's keys in the recipe", columns, tuple(rows))] if rows else []


def _yaml(value: Any) -> str:
    """Write a value as it stands in a YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _modules(
    plan: RunPlan,
    sections: Sections,
    model: ModelSpec | None,
    pins: PinPolicy | None,
    gpu_memory: float | None,
    problems: list[str],
) -> list[Section]:
    """Tables of the model's modules and of a rollout's memory, as far as the model is known.

    What is refused is added to ``problems``.
    """
    recipe = plan.recipe
    in_fp8 = [name for name in ("rollout", "training") if getattr(recipe, name)]
    # Without FP8 nothing is refused, but the memory of such a model may be unknown.
    unknown = not in_fp8 and model is not None and model.refused(rollout=True, training=False)
    if in_fp8 and pins is None:
        written = recipe.pins.model_dump(mode="json", exclude_defaults=True)
        told = tuple((f"pins.{key}", _yaml(value)) for key, value in written.items())
        always = ("always", "lm_head, embed_tokens, norms, routers")
        return [Section("kept in BF16", ("", ""), (*told, always))]
    if model is None or pins is None or unknown:
        return []
    rows = pins.report()
    found = []
    if in_fp8:
        title = f"precision of each module in {' and '.join(in_fp8)}"
        found.append(precision_section(rows, title))
    if _has_rollouts(sections):
        served = rows if recipe.rollout else [replace(row, precision="bf16") for row in rows]
        dtype = kv_dtype(recipe)
        memory = rollout_section(sections, model, served, dtype, gpu_memory, problems)
        if memory:
            found += [*memory, wake_up_section(sections, model, served, gpu_memory)]
    return found
