"""Write a model as a block-FP8 checkpoint for stock vLLM and transformers.

It is in the format that SGLang documents too (not run).

The folder has E4M3 weights with ``weight_scale_inv`` in float32 for each block of 128x128 (the
format of DeepSeek-V3's checkpoints), KV scales, and a ``quantization_config``. Codes and scales are
those that an engine with fp8rl makes of the same weights by the same recipe.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fp8rl.errors import Fp8RLError, ModelError, OptionError, ScaleError, UnsupportedError
from fp8rl.kv_scales import (
    ROLES,
    Role,
    check_scale,
    parse_scale_name,
    require_one_name,
    scale_name,
)
from fp8rl.models.families import FAMILIES, FUSED, Experts
from fp8rl.models.folder import (
    INDEX,
    RECIPE_FILE,
    folder_config,
    folder_spec,
    folder_tensors,
    is_own,
    require_listed,
)
from fp8rl.models.pins import PinPolicy
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import BLOCK, all_finite, quantize_block
from fp8rl.plugins.manager import PluginManager
from fp8rl.reading import parse_json, printable
from fp8rl.recipe import Recipe
from fp8rl.weight_files import Watched, WeightFile, read_text

SHARD_BYTES = 2 * 2**30
"""Size from which a file of the new folder is full; a larger tensor has a file of its own."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of files with weights, which are not copied."""
_LEFT_OUT = ("config.json", INDEX, "pytorch_model.bin.index.json", "state.json", "SHA256SUMS")
"""Other files that are not copied: they describe the source's own files."""
_NO_LINEAR = ("norm", "embed_tokens")
"""Kinds of modules that no engine would quantize, listed or not."""
_OF_CODES = re.compile(
    r".*(?:_scale_inv|\.weight_scale\w*|\.\w*(?:put|activation)_scale|\.(?:kv|[qkv])_scale"
    r"|\.[qkv]_zero_point|\.[qkv](?:_cache)?\.scale)"
)
"""Names of tensors that engines read as scales, of weights, activations or a KV cache."""
_PREFIXES = tuple(dict.fromkeys(("model.", *(f.wrapper for f in FAMILIES if f.wrapper))))
"""What precedes ``layers`` in the names of KV scales."""
_NAMED = 3
"""Names of one kind that an error has; of the others it has the number."""
_Seen = TypeVar("_Seen", bound=Watched)
_TO_HF = "examples/converters/convert_{}_to_hf.py of NeMo RL"


@dataclass(frozen=True)
class Export:
    """An export that has been checked and can be written."""

    checkpoint: Path
    """Folder of the BF16 model."""
    config: Mapping[str, Any]
    """Its ``config.json``."""
    spec: ModelSpec
    """The same, read."""
    recipe: Recipe
    """Recipe of the rollouts."""
    policy: PinPolicy
    """Precision of each module."""
    files: Mapping[WeightFile, Sequence[str]]
    """Names of the tensors to read from each file, without KV scales."""
    copied: Sequence[Watched]
    """Files to copy: tokenizer and whatever else describes the model."""
    described: Sequence[Watched]
    """``config.json`` and index, as they were when they were read."""
    beside: Sequence[str]
    """Stored modules that are not part of the policy, such as draft layers: they stay in BF16."""
    kv_scales: Mapping[str, float]
    """KV scales by the names that stock engines read."""

    @property
    def tensors(self) -> int:
        """Number of tensors to read."""
        return sum(map(len, self.files.values()))

    def parts(self, tensor: str) -> list[str]:
        """The FP8 weights that a stored tensor holds; empty if it stays as it is.

        A tensor of all experts of a layer holds those of each expert, gate before up.
        """
        return self._parts.get(tensor, [])

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        experts = self.spec.family.experts
        found: dict[str, list[str]] = {}
        for row in self.policy.report():
            if row.precision == "fp8":
                found[f"{row.name}.weight"] = [f"{row.name}.weight"]
                container = _experts_of(row.name)
                if experts and container:
                    leaf = row.name.rpartition(".")[2]
                    fused = experts.fused[leaf == experts.leaves[-1]]
                    found.setdefault(f"{container}.{fused}", []).append(f"{row.name}.weight")
        return found

    def quantization_config(self) -> dict[str, Any]:
        """The ``quantization_config``: keys of vLLM, SGLang and transformers, and the recipe.

        vLLM reads ``ignored_layers`` or, where that is empty, ``modules_to_not_convert``; SGLang
        the first that is there; transformers the second. An engine with ``quantization="fp8rl"``
        takes the recipe from here.
        """
        alone = [*left_alone(self.policy, self.spec.family.experts), *self.beside]
        formats = {self.recipe.weights.scale_format, self.recipe.activations.scale_format}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            **({"scale_fmt": "ue8m0"} if formats == {"pow2"} else {}),
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "ignored_layers": alone,
            "modules_to_not_convert": alone,
            "recipe": self.recipe.to_dict(),
        }


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
    _require_model(checkpoint)
    described = [_seen(Watched, file) for file in _description(checkpoint)]
    stored = folder_tensors(checkpoint) or {}
    config = folder_config(checkpoint)
    sources = {path: _seen(WeightFile, path) for path in dict.fromkeys(stored.values())}
    copied = [_seen(Watched, file) for file in _to_copy(checkpoint)]
    problems = _problems_of_links([*described, *sources.values(), *copied])
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
    except Fp8RLError as error:
        raise _together(checkpoint, [*problems, error]) from None
    is_scale = {name: _place(name) is not None for name in stored}
    problems += _problems_of_scales([name for name in stored if not is_scale[name]])
    scales: dict[str, float] = {}
    try:
        if kv_scales is None:
            held = {n: f for n, path in stored.items() if n in (f := sources[path]).tensors}
            found = _one_value_each({name: held[name] for name in held if is_scale[name]})
        else:
            found = _read_scales(kv_scales)
        scales = _kv_scales(found, spec, recipe)
    except Fp8RLError as error:
        problems.append(error)
    try:
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
    problems += _problems_of_experts(policy)
    problems += _problems_of_tensors(export)
    if problems:
        raise _together(checkpoint, problems)
    return export


def write_export(
    export: Export,
    out: Path,
    *,
    device: str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] = lambda tensor: None,
) -> None:
    """Write the folder; it appears complete or not at all.

    Memory holds one file of ``shard_bytes``, a copy of it while it is written, and one tensor of
    the source.

    Args:
        export: see :func:`plan_export`.
        out: folder that does not exist yet.
        device: device that quantizes.
        shard_bytes: size from which a file is full.
        progress: called with the name of each tensor that has been read.

    Raises:
        OptionError: ``out`` exists or cannot be written.
        ModelError: a tensor that has NaN or infinities, or a source that cannot be read or has been
            changed since :func:`plan_export`.
    """
    if os.path.lexists(out):
        raise _exists(out)
    own: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Of a name that no other export has, in whatever container or on whatever machine it runs.
        own = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        partial = own / out.name  # with the usual rights, unlike the folder around it
        partial.mkdir()
        _write_weights(export, partial, device, shard_bytes, progress)
        _write_config(export, partial)
        for source in (*export.described, *export.files, *export.copied):
            source.require_unchanged()
        mode = (partial / "config.json").stat().st_mode
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)  # safetensors gives access to the owner alone
        for file in (*partial.iterdir(), partial):
            _sync(file)
        partial.rename(out)
        _sync(out.parent)
    except (OSError, SafetensorError) as error:
        if os.path.lexists(out):  # by another export
            raise _exists(out) from None
        raise OptionError(
            f"'{out}' cannot be written ({getattr(error, 'strerror', None) or error}); give a "
            "folder with enough space that you may write to."
        ) from None
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _exists(out: Path) -> OptionError:
    return OptionError(f"'{out}' exists; give a folder that does not, or remove it first.")


def _beside(stored: Iterable[str], names: Iterable[str]) -> list[str]:
    """Stored modules that are none of ``names``; experts in one tensor count as one module."""
    known = {*names, *filter(None, map(_experts_of, names))}
    found = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")}
    fused = (name.rpartition(".") for name in stored if not name.endswith(".weight"))
    found |= {module for module, _, _ in fused if module.endswith(".experts")}
    return sorted(found - known)


def left_alone(policy: PinPolicy, experts: Experts | None) -> list[str]:
    """Names of the modules in BF16 as engines look them up, sorted by layer.

    Besides the names of the checkpoint these are the names of fused modules and of all experts of a
    layer together, also under the name that vLLM gives their block: engines look for one form or
    the other, by whole names or by the start or end of a name.

    Args:
        policy: precision of each module.
        experts: names of the model's experts; None where it has none.
    """
    rows = {row.name: row for row in policy.report()}
    found: dict[str, None] = {}  # a set in order
    for name, row in rows.items():
        if row.precision == "fp8" or row.kind in _NO_LINEAR:
            continue
        container = _experts_of(name)
        if container is not None:
            found[container] = None
            if experts is not None and experts.vllm_block:
                layer = container.removesuffix(f"{experts.block}.experts")
                found[f"{layer}{experts.vllm_block}.experts"] = None
            continue
        found[name] = None
        prefix, _, leaf = name.rpartition(".")
        for fused, parts in FUSED.items():
            if leaf == parts[-1]:
                found[f"{prefix}.{fused}"] = None
    return list(found | {"lm_head": None})  # a tied one has no tensor


def wire_scale_name(stored: str) -> str | None:
    """Return the name on the wire of a KV scale in a checkpoint; None for other tensors."""
    place = _place(stored)
    return scale_name(*place) if place else None


def _place(name: str) -> tuple[int, Role] | None:
    """Layer and role of a KV scale in a checkpoint, under a wrapper too; None for other tensors."""
    found = (parse_scale_name(name, prefix) for prefix in _PREFIXES)
    return next(filter(None, found), None)


def _read_scales(file: Path) -> dict[str, float]:
    """Read KV scales from a JSON object or a safetensors file.

    Raises:
        ScaleError: the file cannot be read, or has a bad value.
    """
    try:
        if file.suffix == ".safetensors":
            source = WeightFile(file)
            return _one_value_each(dict.fromkeys(source.tensors, source))
        found = parse_json(read_text(file), str(file))
    except ScaleError:
        raise
    except (OSError, Fp8RLError) as error:
        why = getattr(error, "strerror", None) or str(error).removesuffix(".")
        raise ScaleError(
            f"KV scales cannot be read from '{file}' ({why}); give a JSON object or a "
            "safetensors file of names and values."
        ) from None
    if not isinstance(found, dict):
        raise ScaleError(f"'{file}' is no JSON object of names and KV scales; correct it.")
    for name, value in found.items():
        if not isinstance(value, float):
            raise ScaleError(
                f"KV scale '{printable(name)}' is {reprlib.repr(value)}; write a number with a "
                "point, such as 0.0625."
            )
    return {name: check_scale(printable(name), value) for name, value in found.items()}


def _one_value_each(places: Mapping[str, WeightFile]) -> dict[str, float]:
    """Read KV scales, by name, from the file of each.

    Raises:
        ModelError: the file was changed.
        ScaleError: a scale that is not one value, or a bad one.
    """
    scales = {}
    for name, file in places.items():
        shape = file.tensors[name].shape
        if math.prod(shape) != 1:  # before a tensor of any size is read
            raise ScaleError(
                f"KV scale '{printable(name)}' has shape {shape}; store one value per tensor."
            )
        for _, tensor in file.read([name]):
            scales[name] = check_scale(printable(name), tensor)
    return scales


def _kv_scales(given: Mapping[str, float], spec: ModelSpec, recipe: Recipe) -> dict[str, float]:
    """Scales by the names that are written; complete if the recipe needs them.

    Raises:
        ScaleError: a scale that is missing, there twice, or of no layer of the model.
        UnsupportedError: the recipe quantizes a cache that has no scales.
    """
    prefix = f"{spec.stem}layers."
    caches = [layer.mixer.kv for layer in spec.layers]
    layers = [layer for layer, kind in enumerate(caches) if kind == "heads"]
    if "latent" in caches and recipe.kv_cache.dtype != "auto":
        raise UnsupportedError(
            f"The recipe has kv_cache.dtype '{recipe.kv_cache.dtype}', but the model caches "
            "latents, which are not quantized; set kv_cache.dtype to auto."
        )
    known = {
        (layer, role): f"{prefix}{layer}.self_attn.{role}_scale"
        for layer in layers
        for role in ROLES
    }
    places = {name: _place(name) for name in given}
    own = ("model.layers.", prefix)
    bad = [name for name, place in places.items() if not place or not name.startswith(own)]
    if bad:
        raise ScaleError(
            f"{_said(bad, 'is', 'are')} no KV scale; names look like '{scale_name(0, 'k')}'."
        )
    names = require_one_name((name, place) for name, place in places.items() if place)
    unknown = [name for place, name in names.items() if place not in known]
    if unknown:
        raise ScaleError(
            f"{_said(unknown, 'belongs', 'belong')} to no layer of the model with "
            "a KV cache of keys and values; give a file of the scales of this model with "
            "--kv-scales."
        )
    missing = [n for place, n in known.items() if place[1] != "q" and place not in names]
    if missing and recipe.kv_cache.has_scales:
        raise ScaleError(
            f"The recipe has kv_cache.dtype '{recipe.kv_cache.dtype}', but there is no KV scale "
            f"{_named(missing)}; give a file of vllm_fp8rl.calibration.calibrate_kv_scales with "
            "--kv-scales, or set kv_cache.dtype to auto."
        )
    return {name: given[names[place]] for place, name in known.items() if place in names}


def _require_model(folder: Path) -> None:
    """Refuse what is no folder of a model, and say what it is.

    Raises:
        ModelError: nothing of the kind is there.
        UnsupportedError: a checkpoint that cannot be read without its engine.
    """
    if not folder.is_dir():
        raise ModelError(f"'{folder}' is no folder; give the folder of a Hugging Face model.")
    weights = any(os.path.lexists(folder / name) for name in (INDEX, "model.safetensors"))
    if weights and os.path.lexists(folder / "config.json"):
        return
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"'{folder}' is a LoRA adapter without its base; merge both into one BF16 model first, "
            f"with merge_and_unload of peft or {_TO_HF.format('lora')}."
        )
    for place in (folder, folder / "policy" / "weights", folder / "weights"):
        if _is_megatron(place):
            raise UnsupportedError(
                f"'{place}' is a checkpoint of Megatron, which only Megatron reads; convert it "
                f"first, with {_TO_HF.format('megatron')}, and export the folder that it writes."
            )
        if any(place.glob("*.distcp")) or any(place.glob("*/*.distcp")):
            raise UnsupportedError(
                f"'{place}' is a distributed checkpoint of PyTorch; convert it first, with "
                f"{_TO_HF.format('dcp')}, or train with checkpointing.save_consolidated: true."
            )
    steps = sorted(path for path in folder.glob("step-*") if (path / "config.json").is_file())
    if steps:
        raise ModelError(f"'{folder}' holds checkpoints; give one of them, such as '{steps[-1]}'.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UnsupportedError(
            f"'{folder}' has its weights in files of torch.save; write them as safetensors first, "
            "with save_pretrained of transformers."
        )
    lacking = "config.json" if weights else "model.safetensors"
    raise ModelError(
        f"'{folder}' has no {lacking}; give the folder of a Hugging Face model in BF16."
    )


def _is_megatron(folder: Path) -> bool:
    return (
        (folder / "latest_checkpointed_iteration.txt").is_file()
        or any(folder.glob("iter_*"))
        or any(folder.glob("mp_rank_*"))
        or (folder.name.startswith("iter_") and (folder / "metadata.json").is_file())
    )


def _served_spec(checkpoint: Path, config: Mapping[str, Any]) -> ModelSpec:
    """Describe a model, and refuse one of which no BF16 rollout can be made FP8.

    Raises:
        UnsupportedError: it is quantized already, or of a kind that is not served.
        ModelError: its config has values that no model has.
    """
    if any("quantization_config" in part for part in (config, config.get("text_config") or ())):
        raise UnsupportedError(
            f"'{checkpoint}' is quantized already ('quantization_config' in its config.json); give "
            "the BF16 model that it was made from."
        )
    spec = folder_spec(checkpoint, config)
    reason = spec.refused(rollout=True, training=False)
    if reason is not None:
        raise UnsupportedError(f"'{checkpoint}' is {reason}; give a model that FP8 rollouts serve.")
    return spec


def _description(folder: Path) -> list[Path]:
    """Files that say what the weights are."""
    files = [folder / "config.json", folder / INDEX]
    return [file for file in files if os.path.lexists(file)]


def _to_copy(folder: Path) -> list[Path]:
    """Files besides weights and what describes them: the tokenizer, for example."""
    return [
        file
        for file in sorted(folder.iterdir())
        if not file.name.startswith(".")
        and file.name not in (*_LEFT_OUT, RECIPE_FILE)
        and file.suffix not in _WEIGHTS
        and not file.is_dir()
    ]


def _seen(kind: type[_Seen], file: Path) -> _Seen:
    """Look at a file of the model, to notice a change from now on."""
    try:
        return kind(file)
    except OSError as error:
        raise ModelError(
            f"'{file}' cannot be read ({error.strerror or error}); put the file there, or download "
            "the model again."
        ) from None


def _together(checkpoint: Path, problems: Sequence[Fp8RLError]) -> Fp8RLError:
    """One error for all problems, or the only one."""
    if len(problems) == 1:
        return problems[0]
    listed = " ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
    return type(problems[0])(
        f"'{checkpoint}' cannot be exported, for {len(problems)} reasons: {listed}"
    )


def _named(names: Sequence[str]) -> str:
    """The first names of one kind, and the number of the others."""
    shown = ", ".join(f"'{printable(name)}'" for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _said(names: Sequence[str], one: str, many: str) -> str:
    """The names with a verb."""
    return f"{_named(names)} {one if len(names) == 1 else many}"


def _problems_of_links(sources: Sequence[Watched]) -> list[Fp8RLError]:
    """Links that lead out of the folder: what is there may be anybody's."""
    out = [source.path for source in sources if not is_own(source.path)]
    if not out:
        return []
    links = _named([f"{path.name} -> {path.resolve()}" for path in out])
    return [
        ModelError(
            f"'{out[0].parent}' has links that lead out of it, and not into its Hugging Face "
            f"cache: {links}; copy what belongs to the model to its place (cp -rL, once you have "
            "looked at the links), and remove the others."
        )
    ]


def _problems_of_scales(names: Sequence[str]) -> list[Fp8RLError]:
    """Tensors that engines would read as scales, in the place of those that are written."""
    found = [name for name in names if _OF_CODES.fullmatch(name)]
    if not found:
        return []
    return [
        UnsupportedError(
            f"{_said(found, 'is', 'are')} stored beside the weights, as in a quantized model; "
            "give the BF16 model that it was made from, or store this one without them."
        )
    ]


def _problems_of_experts(policy: PinPolicy) -> list[Fp8RLError]:
    """Pins of a part of a layer's experts, which engines hold in one precision."""
    found: dict[str, set[str]] = {}
    for row in policy.report():
        if container := _experts_of(row.name):
            found.setdefault(container, set()).add(row.precision)
    split = [container for container, precisions in found.items() if len(precisions) > 1]
    if not split:
        return []
    return [
        UnsupportedError(
            f"The pins keep a part of {_named(split)} in BF16, but engines hold all experts of a "
            f"layer in one precision; pin '{split[0]}.*' with pins.names, or none of it."
        )
    ]


def _problems_of_tensors(export: Export) -> list[Fp8RLError]:
    """Weights that are missing, there twice, or that stock engines do not serve in block FP8."""
    unsplit: list[UnsupportedError] = []
    holders: dict[str, list[str]] = {}
    dtypes: dict[str, str] = {}
    misfits: dict[str, list[str]] = {}
    for file, names in export.files.items():
        for name in names:
            parts, about = export.parts(name), file.tensors.get(name)
            for part in parts:
                holders.setdefault(part, []).append(name)
            if about is None or not parts:
                continue
            if about.dtype not in ("BF16", "F16", "F32"):
                dtypes[name] = about.dtype
            try:
                for part, shape in _matrices(name, parts, about.shape):
                    if why := _misfit(part, shape):
                        misfits.setdefault(why, []).append(part)
            except UnsupportedError as error:
                unsplit.append(error)
    problems: list[Fp8RLError] = [*unsplit[:1]]
    if twice := [held for held in holders.values() if len(held) > 1]:
        problems.append(UnsupportedError(f"{_named(twice[0])} hold one weight; store it once."))
    if dtypes:
        kinds = ", ".join(sorted(set(dtypes.values())))
        problems.append(
            UnsupportedError(
                f"{_said(list(dtypes), 'has', 'have')} dtype {kinds}; FP8 is made of BF16 weights, "
                "so give the BF16 model."
            )
        )
    if misfits:
        problems.append(_misfitting(export.policy, misfits))
    fp8 = (f"{row.name}.weight" for row in export.policy.report() if row.precision == "fp8")
    if missing := [name for name in fp8 if name not in holders]:
        problems.append(
            ModelError(
                f"'{export.checkpoint}' has no tensor {_named(missing)}, which its config.json "
                "says it has; download the model again."
            )
        )
    return problems


def _misfitting(policy: PinPolicy, misfits: Mapping[str, Sequence[str]]) -> UnsupportedError:
    """The error for weights that block FP8 does not serve, with the pins that mend it."""
    listed = "; ".join(f"{_said(names, 'has', 'have')} {why}" for why, names in misfits.items())
    bad = {name.removesuffix(".weight") for names in misfits.values() for name in names}
    units = {_unit(name) for name in bad}
    rows = [row for row in policy.report() if row.precision == "fp8"]
    pinned = [row for row in rows if _unit(row.name) in units]
    if len(pinned) == len(rows):
        remedy = "which leaves no weight for FP8: serve this model in BF16"
    else:
        kinds = {row.kind for row in pinned} - {row.kind for row in rows if row not in pinned}
        names = [
            f"{container}.*" if (container := _experts_of(row.name)) else row.name
            for row in pinned
            if row.kind not in kinds
        ]
        pins: dict[str, list[str]] = {"kinds": sorted(kinds), "names": [*dict.fromkeys(names)]}
        text = ", ".join(f"{key}: [{', '.join(found)}]" for key, found in pins.items() if found)
        remedy = f"add to the pins of the recipe, which keep them in BF16: {{{text}}}"
    return UnsupportedError(f"Stock engines do not serve in block FP8: {listed}; {remedy}.")


def _unit(module: str) -> str:
    """What an engine holds in one precision: a module, those that it fuses, or all experts."""
    prefix, _, leaf = module.rpartition(".")
    fused = next((fused for fused, parts in FUSED.items() if leaf in parts), leaf)
    return _experts_of(module) or f"{prefix}.{fused}"


def _matrices(
    name: str, parts: Sequence[str], shape: Sequence[int]
) -> list[tuple[str, Sequence[int]]]:
    """The weights in a stored tensor with their shapes.

    Raises:
        UnsupportedError: a tensor of all experts that cannot be split into these weights.
    """
    if parts == [name]:
        return [(name, shape)]
    count = shape[0] if len(shape) == 3 else 0
    if not count or len(parts) % count or shape[1] % (each := len(parts) // count):
        raise UnsupportedError(
            f"'{name}' has shape {list(shape)}, which does not hold {len(parts)} weights of "
            "experts; correct the number of experts in config.json, or write the experts one by "
            "one with an earlier transformers."
        )
    return [(part, (shape[1] // each, shape[2])) for part in parts]


def _misfit(name: str, shape: Sequence[int]) -> str:
    """Say what block FP8 of stock engines does not serve in a weight; empty: it does."""
    if len(shape) != 2:
        return f"shape {list(shape)}, no matrix"
    rows, columns = shape
    if columns % BLOCK[1]:
        return f"{columns} columns, no multiple of {BLOCK[1]}"
    leaf = name.split(".")[-2]
    fused = next((fused for fused, parts in FUSED.items() if leaf in parts[:-1]), None)
    if fused is not None and rows % BLOCK[0]:  # the last one may end in a part of a block
        return f"{rows} rows, no multiple of {BLOCK[0]}, where engines fuse it into '{fused}'"
    return ""


def _experts_of(name: str) -> str | None:
    """The name of all experts of a layer together, from the name of a module of one of them."""
    before, found, after = name.partition(".experts.")
    return f"{before}.experts" if found and after.split(".")[0].isdecimal() else None


def _write_weights(
    export: Export,
    folder: Path,
    device: str,
    shard_bytes: int,
    progress: Callable[[str], None],
) -> None:
    """Write the tensors in files of about ``shard_bytes``, and their index."""
    shard: dict[str, torch.Tensor] = {}
    size = total = 0
    table: dict[str, str] = {}
    written: list[Path] = []

    def flush() -> None:
        nonlocal shard, size
        if shard:
            file = folder / f"{len(written) + 1:05}.safetensors"
            save_file(shard, file, metadata={"format": "pt"})
            table.update(dict.fromkeys(shard, file.name))
            written.append(file)
            shard, size = {}, 0

    for name, tensor in _tensors(export, device, progress):
        if size and size + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    final = {}
    for number, file in enumerate(written, 1):
        final[file.name] = f"model-{number:05}-of-{len(written):05}.safetensors"
        file.rename(folder / final[file.name])
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: final[table[name]] for name in sorted(table)},
    }
    _write_json(folder / INDEX, index)


def _tensors(
    export: Export, device: str, progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the new folder, on the CPU, in the order of the source."""
    for file, names in export.files.items():
        for name, tensor in file.read(names):
            if tensor.is_floating_point() and not all_finite([tensor])[0]:
                raise ModelError(
                    f"'{name}' in '{file.path}' has NaN or infinite values; give a checkpoint from "
                    "before the training diverged."
                )
            parts = export.parts(name)
            if not parts:
                yield name, tensor
            for part, matrix in _split(name, parts, tensor):
                codes, scale_inv = quantize_block(
                    matrix.to(device), BLOCK, export.recipe.weights.scale_format
                )
                yield part, codes.cpu()
                yield f"{part}_scale_inv", scale_inv.cpu()
            progress(name)
    for name, scale in export.kv_scales.items():
        yield name, torch.tensor([scale], dtype=torch.float32)


def _split(
    name: str, parts: Sequence[str], tensor: torch.Tensor
) -> Iterable[tuple[str, torch.Tensor]]:
    """The weights in a stored tensor; none if it has no ``parts``."""
    if not parts:
        return ()
    rows = [rows for _, (rows, _) in _matrices(name, parts, tensor.shape)]
    return zip(parts, tensor.reshape(-1, tensor.shape[-1]).split(rows), strict=True)


def _write_config(export: Export, folder: Path) -> None:
    """Write ``config.json`` and copy the tokenizer and whatever else describes the model."""
    quantized = {**export.config, "quantization_config": export.quantization_config()}
    _write_json(folder / "config.json", quantized)
    for file in export.copied:
        with file.open() as source, (folder / file.path.name).open("wb") as copy:
            shutil.copyfileobj(source, copy)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
