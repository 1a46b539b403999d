"""Check everything about an export before its first weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8rl.errors import Fp8RLError, ModelError, OptionError, UnsupportedError
from fp8rl.export.format import Export
from fp8rl.export.names import experts_of
from fp8rl.export.problems import (
    problems_of_experts,
    problems_of_links,
    problems_of_scales,
    problems_of_tensors,
)
from fp8rl.export.scales import one_value_each, place_of, read_scales, served_scales
from fp8rl.export.source import description, files_to_copy, require_model, seen
from fp8rl.models.folder import (
    folder_config,
    folder_spec,
    folder_tensors,
    require_listed,
    require_plain_weights,
)
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.manager import PluginManager
from fp8rl.recipe import Recipe
from fp8rl.weight_files import Watched, WeightFile


def check_device(device: str) -> None:
    """Raise OptionError unless tensors can be made on a device and read back."""
    try:
        torch.empty(0, device=device).cpu()
    except (AssertionError, RuntimeError) as error:  # the first where torch has no CUDA
        reason = str(error).partition("\n")[0].rstrip(".")
        raise OptionError(
            f"--device {device} cannot be used ({reason}); give cpu, or a device that this torch "
            "serves."
        ) from None


def plan_export(
    checkpoint: Path,
    recipe: Recipe,
    *,
    kv_scales: Path | None = None,
    plugins: PluginManager | None = None,
) -> Export:
    """Check everything that can be checked before the first weight is read.

    Args:
        checkpoint: folder of a BF16 model in Hugging Face's format, with safetensors; a checkpoint
            of ``fp8rl demo`` is one.
        recipe: what the rollouts run in FP8.
        kv_scales: JSON or safetensors file with KV scales by name, instead of the checkpoint's.
        plugins: plugins that may add pins.

    Raises:
        ModelError: no such model, or a file that cannot be read, is no regular file, or is a link
            that leads out of the folder and its cache.
        UnsupportedError: a checkpoint of another kind, a model or a size that is not served, or a
            stored scale of codes.
        ScaleError: a KV scale that is missing, unknown, bad, or there twice.
        PinError: a pin that matches nothing or splits a fused module.
        OptionError: a recipe that leaves everything in BF16.
        Fp8RLError: several of these, in the class of the first; the message has all.
    """
    require_model(checkpoint)
    described = [seen(Watched, file) for file in description(checkpoint)]
    stored = folder_tensors(checkpoint) or {}
    config = folder_config(checkpoint)
    sources = {path: seen(WeightFile, path) for path in dict.fromkeys(stored.values())}
    copied = [seen(Watched, file) for file in files_to_copy(checkpoint)]
    problems = problems_of_links([*described, *sources.values(), *copied])
    try:
        require_listed(sources.values(), stored)
    except ModelError as error:
        problems.append(error)
    if not recipe.rollout:
        problems.append(
            OptionError(
                "The recipe has rollout: false, which leaves every weight in BF16; give the recipe "
                "of an FP8 rollout with --recipe."
            )
        )
    try:
        spec = _served_spec(checkpoint, config)
        is_scale = {name: place_of(name) is not None for name in stored}
        problems += problems_of_scales([name for name in stored if not is_scale[name]])
        scales: dict[str, float] = {}
        try:
            if kv_scales is None:
                held = {n: f for n, path in stored.items() if n in (f := sources[path]).tensors}
                found = one_value_each({name: held[name] for name in held if is_scale[name]})
            else:
                found = read_scales(kv_scales)
            scales = served_scales(found, spec, recipe)
        except Fp8RLError as error:
            problems.append(error)
        policy = (plugins or PluginManager(discover=False)).pin_policy(recipe.pins, spec.names)
    except Fp8RLError as error:
        raise _together(checkpoint, [*problems, error]) from None
    files: dict[WeightFile, list[str]] = {file: [] for file in sources.values()}
    for name, path in stored.items():
        if not is_scale[name]:
            files[sources[path]].append(name)
    beside = _beside(stored, spec.names)
    export = Export(
        checkpoint, config, spec, recipe, policy, files, copied, described, beside, scales
    )
    problems += problems_of_experts(policy)
    problems += problems_of_tensors(export)
    if problems:
        raise _together(checkpoint, problems)
    return export


def _beside(stored: Iterable[str], names: Iterable[str]) -> list[str]:
    """Stored modules that are none of ``names``; experts in one tensor count as one module."""
    known = {*names, *filter(None, map(experts_of, names))}
    found = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")}
    fused = (name.rpartition(".") for name in stored if not name.endswith(".weight"))
    found |= {module for module, _, _ in fused if module.endswith(".experts")}
    return sorted(found - known)


def _served_spec(checkpoint: Path, config: Mapping[str, Any]) -> ModelSpec:
    """Describe a model, and refuse one of which no BF16 rollout can be made FP8."""
    require_plain_weights(config, str(checkpoint))
    spec = folder_spec(checkpoint, config)
    reason = spec.refused(rollout=True, training=False)
    if reason is not None:
        raise UnsupportedError(f"'{checkpoint}' is {reason}; give a model that FP8 rollouts serve.")
    return spec


def _together(checkpoint: Path, problems: Sequence[Fp8RLError]) -> Fp8RLError:
    """Return one error for all problems, or the only one."""
    if len(problems) == 1:
        return problems[0]
    listed = " ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
    return type(problems[0])(
        f"'{checkpoint}' cannot be exported, for {len(problems)} reasons: {listed}"
    )
