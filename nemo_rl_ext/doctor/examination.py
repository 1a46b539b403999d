"""Tell what a config will do, by the functions with which NeMo RL's driver reads and checks it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from fp8rl import PluginManager, Recipe
from fp8rl.adapters import ConfigRequest, Diagnosis, Section
from fp8rl.errors import Fp8RLError, OptionError, UnsupportedError
from fp8rl.families import config_module_names, unsupported_reason
from fp8rl.model_folder import folder_config
from fp8rl.pinning import PinRow
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
from nemo_rl_ext.config.keys import Keys, Sections, block_path, has_fp8_kv
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.model_pins import check_pins, model_config, with_overrides
from nemo_rl_ext.doctor import memory
from nemo_rl_ext.doctor.config_file import load_config
from nemo_rl_ext.doctor.installation import (
    Patch,
    compare_patches,
    find_package,
    installed_package,
    version,
)
from nemo_rl_ext.patches.upstream import KNOWN

_BF16 = Recipe.from_dict({"rollout": False, "training": False, "kv_cache": {"dtype": "auto"}})


def diagnose() -> Diagnosis:
    """Describe the installed NeMo RL, and which patches fit it."""
    package = installed_package()
    if package is None:
        problem = (
            "NeMo RL is not installed here; run this in the environment of its driver, or give "
            "--config and --source with a checkout."
        )
        return Diagnosis(None, (KNOWN,), problems=(problem,))
    patches = compare_patches(package)
    fit = sum(not patch.misfits for patch in patches)
    return Diagnosis(
        version(package),
        (KNOWN,),
        {
            "patches": f"{fit} of {len(patches)} fit",
            "config": "not looked at; give --config X.yaml",
        },
        tuple(_misfits(patches)),
    )


def examine(request: ConfigRequest) -> Diagnosis:
    """Describe what NeMo RL would do with a config.

    Returns:
        A section per topic. What the driver would refuse is in ``problems``.

    Raises:
        OptionError: the config, the checkout or the model's folder cannot be read, or the recipe
            has no place in the config.
        RecipeError: the config is no YAML, or cannot be resolved.
        UnsupportedError: there is no NeMo RL, or the config is for no driver of it.
        ModelError: the model's ``config.json`` has impossible numbers.
    """
    package = find_package(request.source)
    config = load_config(request.file)
    driver = driver_of(config)
    if driver is None:
        known = ", ".join(driver.section for driver in DRIVERS.values())
        raise UnsupportedError(
            f"'{request.file}' is a config of no driver that fp8rl knows: it has none of the "
            f"sections {known}; give the config of a run."
        )
    given = [path for path, _, _, value in find(config) if value is not None]
    block = _block_for(config, driver, given, request)
    if block is not None:
        config = _with_block(config, driver, block)
    sections = Sections(config, driver)
    model, origin = _model(request, sections.policy)
    patches = compare_patches(package)
    problems = _misfits(patches) if given or block is not None else []
    facts = {
        "config": f"{request.file.name}, for examples/{driver.scripts[0]}",
        "model": origin,
        "fp8rl keys": _keys_told(given, block, sections),
    }
    notes: list[str] = []
    found: list[Section] = []
    try:
        keys = read(config, driver)
        recipe = keys.recipe if keys is not None else _BF16
        if keys is not None:
            notes += keys.notes
            notes += check_pins(recipe, keys.places[0], sections.policy, model)
    except Fp8RLError as error:
        problems.append(str(error))
    else:
        facts |= _decisions(recipe, keys, sections)
        if keys is not None and keys.taken:
            found.append(_upstream_keys(keys, sections))
        found += _modules_and_memory(recipe, sections, model, request.gpu_memory, problems)
    found.append(_patch_section(patches))
    if notes:
        found.append(Section("notes", ("",), tuple((note,) for note in notes)))
    return Diagnosis(
        f"{version(package)}, in {package.parent}", (KNOWN,), facts, tuple(problems), tuple(found)
    )


def _block_for(
    config: Mapping[str, Any], driver: Driver, given: list[str], request: ConfigRequest
) -> dict[str, Any] | None:
    """Return the block to look at where the config has none: --recipe, or what upstream's keys say.

    None where the config has a block, or where nothing asks for FP8.
    """
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
    sections = Sections(config, driver)
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


def _with_block(
    config: Mapping[str, Any], driver: Driver, block: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy a config, with the block in each of its sections that the driver reads."""
    changed = copy.deepcopy(dict(config))
    for path in driver.serves:
        section: Any = changed
        for part in path.split("."):
            section = section.get(part) or {}
        if section:
            section[BLOCK] = dict(block)
    return changed


def _model(request: ConfigRequest, policy: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the values of the model's ``config.json``, if it is here, and say where it is from."""
    name = policy.get("model_name")
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
        return "none, and nothing runs in FP8"
    places = ", ".join(map(block_path, sections.blocks))
    return (
        f"none, so NeMo RL runs without fp8rl; what follows is for the block {json.dumps(block)} "
        f"at {places}"
    )


def _decisions(recipe: Recipe, keys: Keys | None, sections: Sections) -> dict[str, str]:
    """Say in a line each what runs in FP8 and how the loss is corrected."""
    gpus = memory.gpus_of(sections)
    megatron = sections.megatron.get("enabled")
    facts = {}
    if sections.generation:
        linears = "FP8 linear layers" if recipe.rollout else "BF16 linear layers"
        cache = "FP8" if has_fp8_kv(recipe) else "BF16"
        facts["rollout"] = f"{linears}, {cache} KV cache; {_count(gpus.rollout)}"
    linears = "FP8 linear layers" if recipe.training else "BF16"
    trainer = "Megatron" if megatron else "DTensor"
    shared = " that vLLM uses in turn" if gpus.shared and sections.generation else ""
    facts["training"] = f"{linears}; {trainer} on {_count(gpus.training)}{shared}"
    if LOSS in sections.blocks:
        correction = recipe.importance_sampling
        low = "" if correction.low is None else f"{correction.low:g} to "
        bounds = "" if correction.mode == "off" else f" {low}{correction.high:g}"
        facts["correction"] = f"{correction.level} level, {correction.mode}{bounds}"
    if keys is not None and LOSS in sections.driver.serves:
        guard = keys.guard
        facts["mismatch guard"] = "off" if guard is None else f"on, fallback: {guard.fallback}"
    return facts


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


def _upstream_keys(keys: Keys, sections: Sections) -> Section:
    rows = []
    for path, ours in dict.fromkeys(keys.taken):
        parent, _, key = path.rpartition(".")
        value: Any = keys.recipe.to_dict()
        for part in ours.split("."):
            value = value[part]
        became = f"{ours} takes its place" if isinstance(value, dict) else f"{ours}: {_yaml(value)}"
        rows.append((path, _yaml(sections.at(parent).get(key)), became))
    return Section(
        "NeMo RL's keys in the recipe", ("key", "value", "becomes in the recipe"), tuple(rows)
    )


def _yaml(value: Any) -> str:
    """Write a value as it stands in a YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _modules_and_memory(
    recipe: Recipe,
    sections: Sections,
    model: Mapping[str, Any],
    gpu_memory: float | None,
    problems: list[str],
) -> list[Section]:
    """Tables of the model's modules and of a GPU's memory, as far as the model is known."""
    try:
        names = config_module_names(model)
    except KeyError:
        names = None
    if names is None or unsupported_reason(model, rollout=True, training=True) is not None:
        return [_pins(recipe)] if recipe.rollout or recipe.training else []
    rows = PluginManager().pin_policy(recipe.pins, names).report()
    found = []
    if recipe.rollout or recipe.training:
        where = "rollout and training"
        if not (recipe.rollout and recipe.training):
            where = "rollout" if recipe.rollout else "training"
        found.append(precision_section(rows, f"precision of each module in {where}"))
    if sections.generation.get("backend", "vllm") == "vllm" and sections.vllm:
        served = rows if recipe.rollout else [_in_bf16(row) for row in rows]
        rollout = memory.rollout_memory(sections, model, served, has_fp8_kv(recipe))
        if rollout.split_problem is not None:
            problems.append(f"'{VLLM}.tensor_parallel_size': {rollout.split_problem}")
        else:
            found.append(memory.rollout_section(sections, rollout, gpu_memory, problems))
    if sections.megatron.get("enabled"):
        gpus = memory.gpus_of(sections).training
        training = memory.training_memory(sections, model, rows, gpus)
        if training is not None:
            found.append(memory.training_section(sections, training, recipe.training))
    return found


def _in_bf16(row: PinRow) -> PinRow:
    return PinRow(row.name, row.layer, row.kind, "bf16", row.reason)


def _pins(recipe: Recipe) -> Section:
    """The pins as they are written, where the modules of the model are not known."""
    pins = recipe.pins.model_dump(mode="json", exclude_defaults=True)
    rows = [(f"pins.{key}", _yaml(value)) for key, value in pins.items()]
    always = ("always", "lm_head, embed_tokens, norms, routers")
    return Section("kept in BF16", ("", ""), (*rows, always))


def _patch_section(patches: list[Patch]) -> Section:
    rows = (
        (patch.name, patch.purpose, "does not fit" if patch.misfits else "fits")
        for patch in patches
    )
    return Section("patches of this NeMo RL", ("patch", "what it changes", "state"), tuple(rows))


def _misfits(patches: list[Patch]) -> list[str]:
    """One sentence for each patch that does not fit."""
    return [
        f"Patch '{patch.name}' does not fit this NeMo RL: {patch.misfits[0]} Install the NeMo RL "
        f"that docs/nemo_rl.md names ({len(patch.misfits)} of {patch.internals} internals differ)."
        for patch in patches
        if patch.misfits
    ]
