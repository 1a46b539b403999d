"""Tell what a config will do, by the functions with which NeMo RL's driver reads and checks it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from fp8rl import PluginManager, Recipe
from fp8rl.errors import Fp8RLError, OptionError, RecipeError, UnsupportedError
from fp8rl.models.folder import folder_config
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, Section
from fp8rl.precision_report import precision_section
from nemo_rl_ext.config.drivers import (
    BLOCK,
    DRIVERS,
    LOSS,
    MEGATRON,
    VLLM,
    Driver,
    driver_of,
    find,
)
from nemo_rl_ext.config.keys import Sections, block_path, kv_dtype, section_at
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.model_pins import model_config, model_spec, with_overrides
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.config.values import SWITCHES
from nemo_rl_ext.doctor import memory
from nemo_rl_ext.doctor.config_file import load_config
from nemo_rl_ext.doctor.installation import (
    Patch,
    find_package,
    installed_package,
    look_at,
)
from nemo_rl_ext.patches.upstream import KNOWN

_MAPPINGS = (
    VLLM,
    "policy.generation.vllm_kwargs",
    "policy.generation.colocated.resources",
    "env.reward_model.resources",
    "data",
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg",
    f"{MEGATRON}.fp8_cfg",
    f"{MEGATRON}.model_overrides",
    f"{MEGATRON}.peft",
    "policy.hf_config_overrides",
    LOSS,
    "grpo.async_grpo",
    "ppo.async_ppo",
    "data_plane",
    "cluster",
)
"""Sections that are looked into here and in :mod:`nemo_rl_ext.config`."""
_COUNTS = (
    f"{VLLM}.tensor_parallel_size",
    f"{VLLM}.pipeline_parallel_size",
    f"{VLLM}.expert_parallel_size",
    f"{MEGATRON}.tensor_model_parallel_size",
    f"{MEGATRON}.pipeline_model_parallel_size",
    f"{MEGATRON}.context_parallel_size",
    "cluster.num_nodes",
    "cluster.gpus_per_node",
)
"""Keys with a positive integer; a missing one counts as 1."""
_COUNTS_OR_NULL = (
    "policy.generation.colocated.resources.num_nodes",
    "policy.generation.colocated.resources.gpus_per_node",
    "policy.generation.vllm_kwargs.kv_cache_memory_bytes",
    "env.reward_model.resources.num_nodes",
    "env.reward_model.resources.gpus_per_node",
)
_CONVERTED = (
    "cluster.",
    f"{MEGATRON}.",
    "policy.generation.colocated.",
    f"{LOSS}.",
    "grpo.",
    "ppo.",
    "async_rl.",
    "data_plane.",
)
"""Where NeMo RL's config classes declare their values, and so convert them from text."""


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
        {
            "patches": f"{fit} of {len(found.patches)} fit",
            "config": "not looked at; give X.yaml",
        },
        found.problems,
    )


def examine(request: ConfigRequest) -> Diagnosis:
    """Describe what NeMo RL would do with a config.

    Returns:
        A section per topic. What the driver would refuse is in ``problems``.

    Raises:
        OptionError: the config, the checkout or the model's folder cannot be read, or the recipe
            has no place in the config.
        RecipeError: the config is no YAML, cannot be resolved, or has a value for a section or
            no number where one is needed.
        UnsupportedError: there is no NeMo RL, or the config is for no driver of it.
        ModelError: the model's ``config.json`` has impossible numbers.
    """
    nemo_rl = look_at(find_package(request.source))
    config = load_config(request.file)
    driver = _driver_for(config, request.file)
    _check_sections(config)
    sections = Sections(config, driver)
    _read_numbers(sections)
    given = [path for path, _, _, value in find(config) if value is not None]
    block = _block_for(sections, given, request)
    if block is not None:
        _add_block(sections, block)
    values, origin = _model(request, sections.policy)
    problems = [*nemo_rl.problems] if given or block is not None else []
    facts = {
        "config": f"{request.file.name}, for examples/{driver.scripts[0]}",
        "model": origin,
        "fp8rl keys": _keys_told(given, block, sections),
    }
    notes: list[str] = []
    found: list[Section] = []
    model: ModelSpec | None = None
    try:
        model = model_spec(values, sections.policy)
        plan = read(config, driver, (lambda policy: model) if values else None)
    except Fp8RLError as error:
        problems.append(str(error))
    else:
        if plan is not None:
            notes += plan.notes
            if not values:
                notes.append(
                    "whether the model is served and the pins fit it was not looked at, because "
                    "its config.json is not here; the driver looks."
                )
            facts |= _decisions(plan, sections)
            problems += _layout_problems(sections)
            found += _upstream_keys(plan, sections)
            found += _modules(plan.recipe, sections, model, request.gpu_memory, problems)
    found.append(_patch_section(nemo_rl.patches))
    if notes:
        found.append(Section("notes", ("",), tuple((note,) for note in notes)))
    return Diagnosis(
        f"{nemo_rl.version}, in {nemo_rl.package.parent}",
        (KNOWN,),
        facts,
        tuple(problems),
        tuple(found),
    )


def rollout_recipe(file: Path) -> Recipe:
    """Read the recipe of the rollouts from a config, as its driver does.

    Upstream's keys add to the block there: layers and modules in BF16, formats of scales.

    Raises:
        OptionError: the config cannot be read.
        RecipeError: no block for the rollouts, or a bad key.
        UnsupportedError: a config of no driver, or a key that the driver would refuse.
    """
    config = load_config(file)
    driver = _driver_for(config, file)
    _check_sections(config)
    plan = read(config, driver)
    if plan is None or VLLM not in plan.sections:
        raise RecipeError(
            f"'{file}' has no '{block_path(VLLM)}', the recipe of its rollouts; add it, or give a "
            "recipe with --recipe."
        )
    return plan.recipe


def _driver_for(config: Mapping[str, Any], file: Path) -> Driver:
    driver = driver_of(config)
    if driver is None:
        known = ", ".join(driver.section for driver in DRIVERS.values())
        raise UnsupportedError(
            f"'{file}' is a config of no driver that fp8rl knows: it has none of the sections "
            f"{known}; give the config of a run."
        )
    return driver


def _check_sections(config: Mapping[str, Any]) -> None:
    """Refuse a value in the place of a section, as NeMo RL's own check of its config does."""
    for path in _MAPPINGS:
        section_at(config, path)


def _read_numbers(sections: Sections) -> None:
    """Convert numbers in quotes where NeMo RL's config classes do, and refuse what is no number."""
    kinds: tuple[tuple[tuple[str, ...], str, TypeAdapter[Any]], ...] = (
        (_COUNTS, "a positive integer", TypeAdapter(PositiveInt)),
        (_COUNTS_OR_NULL, "a positive integer or null", TypeAdapter(PositiveInt | None)),
        (
            (f"{VLLM}.gpu_memory_utilization",),
            "a number from 0 to 1",
            TypeAdapter(Annotated[float, Field(ge=0, le=1)]),
        ),
        (SWITCHES, "true or false", TypeAdapter(bool | None)),
    )
    for paths, wanted, number in kinds:
        for path in paths:
            parent, _, key = path.rpartition(".")
            section: Any = sections.at(parent)
            if key not in section:
                continue
            value = section[key]
            try:
                converted = number.validate_python(value)
            except ValidationError:
                raise RecipeError(
                    f"'{path}' is {_yaml(value)}, not {wanted}; correct the config."
                ) from None
            if isinstance(value, str) and not path.startswith(_CONVERTED):
                raise RecipeError(
                    f"'{path}' is the text '{value}', not {wanted}, and NeMo RL does not convert "
                    "it there; remove the quotes (${oc.decode:${oc.env:NAME}} makes a number of an "
                    "environment variable)."
                )
            section[key] = converted


def _block_for(
    sections: Sections, given: list[str], request: ConfigRequest
) -> dict[str, Any] | None:
    """Return the block to look at where the config has none: --recipe, or what upstream's keys say.

    Returns:
        None where the config has a block, or where no key asks for FP8.

    Raises:
        OptionError: --recipe would not be read.
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
        return request.recipe.model_dump(mode="json", exclude_unset=True)
    block = {
        "rollout": sections.vllm.get("precision") == "fp8",
        "training": bool(
            sections.megatron.get("enabled") and sections.at(f"{MEGATRON}.fp8_cfg").get("enabled")
        ),
    }
    if given or not driver.serves or not any(block.values()):
        return None
    fp8_kv = sections.vllm.get("kv_cache_dtype") in ("fp8", "fp8_e4m3")
    return {**block, "kv_cache": {"dtype": "fp8_e4m3" if fp8_kv else "auto"}}


def _add_block(sections: Sections, block: Mapping[str, Any]) -> None:
    """Write the block into each section that the config has and the driver reads."""
    for path in sections.driver.serves:
        section: Any = sections.at(path)
        if section:
            section[BLOCK] = dict(block)


def _model(request: ConfigRequest, policy: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the values of the model's ``config.json``, if it is here, and say where it is from."""
    name = policy.get("model_name")
    if not isinstance(name, str | None):
        raise RecipeError(f"'policy.model_name' is {_yaml(name)}, not a name; correct the config.")
    if request.model is not None:
        values = with_overrides(folder_config(request.model), policy)
        return values, f"{name}, by the config.json in {request.model}"
    try:
        values = model_config(policy, offline=True)
    except ImportError:  # transformers, which reads it
        values = {}
    if values:
        return values, str(name)
    return {}, f"{name}; its config.json is not on this machine, give its folder with --model"


def _keys_told(given: list[str], block: Mapping[str, Any] | None, sections: Sections) -> str:
    if given:
        return ", ".join(given)
    if block is None:
        return "none, so fp8rl does nothing in this run"
    places = ", ".join(map(block_path, sections.blocks))
    return (
        f"none, so fp8rl does nothing in this run; what follows is for {json.dumps(block)} as "
        f"{places}"
    )


def _decisions(plan: RunPlan, sections: Sections) -> dict[str, str]:
    """Say in a line each what runs in FP8 and how the loss is corrected."""
    recipe, guard = plan.recipe, plan.guard
    gpus = memory.gpus_of(sections)
    facts = {}
    if sections.generation:
        linears = "FP8 linear layers" if recipe.rollout else "BF16 linear layers"
        cache = memory.CACHES[kv_dtype(recipe)]
        backend = sections.generation.get("backend", "vllm")
        facts["rollout"] = f"{linears}, {cache} KV cache; {backend} on {_count(gpus.rollout)}"
    if plan.kv_scales == "trainer":
        facts["KV scales"] = (
            "from the trainer's own forwards, with every refit; recalibrate: "
            f"{recipe.kv_cache.recalibrate}"
        )
    linears = "FP8 linear layers" if recipe.training else "BF16"
    trainer = "Megatron" if plan.megatron else "DTensor"
    same = "the same " if gpus.shared and sections.generation else ""
    turns = ", in turn" if same else ""
    facts["training"] = f"{linears}; {trainer} on {same}{_count(gpus.training)}{turns}"
    if plan.rounded_as != "auto":
        held = memory.CACHES[plan.rounded_as]
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


def _layout_problems(sections: Sections) -> list[str]:
    """One sentence for each engine whose parallel sizes need more GPUs than it has.

    NeMo RL asserts the same once Ray has started. That a size divides the GPUs is left to it.
    """
    gpus = memory.gpus_of(sections)
    layouts: list[tuple[int, str, tuple[str, ...]]] = []
    if sections.generation.get("backend", "vllm") == "vllm" and sections.vllm:
        layouts.append((gpus.rollout, "rollouts", _COUNTS[:2]))
    if sections.megatron.get("enabled"):
        layouts.append((gpus.training, "training", _COUNTS[3:6]))
    problems = []
    for count, use, paths in layouts:
        places = (path.rpartition(".") for path in paths)
        size = math.prod(sections.at(section).get(key, 1) for section, _, key in places)
        if count < size:
            product = " times ".join(map(repr, paths))
            problems.append(
                f"{product} is {size}, but {_count(count)} serve {use}; lower them, or correct "
                "'cluster' and 'policy.generation.colocated'."
            )
    return problems


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


def _upstream_keys(plan: RunPlan, sections: Sections) -> list[Section]:
    """Table of the keys that the recipe has taken over; no table where there are none."""
    rows = []
    for path, ours in dict.fromkeys(plan.taken):
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
    recipe: Recipe,
    sections: Sections,
    model: ModelSpec | None,
    gpu_memory: float | None,
    problems: list[str],
) -> list[Section]:
    """Tables of the model's modules and of a rollout's memory, as far as the model is known.

    What is refused is added to ``problems``.
    """
    in_fp8 = [name for name in ("rollout", "training") if getattr(recipe, name)]
    # Without FP8 nothing is refused, but the memory of such a model may be unknown.
    rollout_in_fp8 = recipe.rollout or not in_fp8
    if (
        model is None
        or not model.has_names
        or model.refused(rollout=rollout_in_fp8, training=recipe.training)
    ):
        return [_pins(recipe)] if in_fp8 else []
    rows = PluginManager().pin_policy(recipe.pins, model.names).report()
    found = []
    if in_fp8:
        title = f"precision of each module in {' and '.join(in_fp8)}"
        found.append(precision_section(rows, title))
    if sections.generation.get("backend", "vllm") == "vllm" and sections.vllm:
        served = rows if recipe.rollout else [replace(row, precision="bf16") for row in rows]
        rollout = memory.rollout_memory(sections, model, served, kv_dtype(recipe))
        if rollout.split_problem is not None:
            problems.append(f"'{VLLM}.tensor_parallel_size': {rollout.split_problem}")
        else:
            found.append(memory.rollout_section(sections, rollout, gpu_memory, problems))
    if sections.megatron.get("enabled"):
        layers = len(model.layers)
        stages = sections.megatron.get("pipeline_model_parallel_size", 1)
        if stages > layers:
            problems.append(
                f"'{MEGATRON}.pipeline_model_parallel_size' is {stages}, more than the model's "
                f"{layers} layers; lower it."
            )
    return found


def _pins(recipe: Recipe) -> Section:
    """The pins as they are written, where the modules of the model are not known."""
    pins = recipe.pins.model_dump(mode="json", exclude_defaults=True)
    rows = [(f"pins.{key}", _yaml(value)) for key, value in pins.items()]
    always = ("always", "lm_head, embed_tokens, norms, routers")
    return Section("kept in BF16", ("", ""), (*rows, always))


def _patch_section(patches: Sequence[Patch]) -> Section:
    rows = (
        (patch.name, patch.purpose, "does not fit" if patch.misfits else "fits")
        for patch in patches
    )
    return Section("patches of this NeMo RL", ("patch", "what it changes", "state"), tuple(rows))
