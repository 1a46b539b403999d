"""Write a model as a block-FP8 checkpoint for stock vLLM and transformers.

It is in the format that SGLang documents too (not run).

The folder has E4M3 weights with ``weight_scale_inv`` in float32 for each block of 128x128 (the
format of DeepSeek-V3's checkpoints), KV scales, and a ``quantization_config``. Codes and scales are
those that an engine with fp8rl makes of the same weights by the same recipe.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp8rl._manager import PluginManager
from fp8rl.errors import ModelError, OptionError, ScaleError, UnsupportedError
from fp8rl.families import (
    FUSED,
    Experts,
    block_of,
    family_of,
    language_config,
    module_names,
    unsupported_reason,
)
from fp8rl.kv_scales import ROLES, Role, check_scale, scale_name
from fp8rl.model_folder import INDEX, RECIPE_FILE, folder_config, folder_tensors
from fp8rl.numerics import BLOCK, all_finite, quantize_block
from fp8rl.pinning import PinPolicy
from fp8rl.recipe import Recipe

SHARD_BYTES = 2 * 2**30
"""Size from which a file of the new folder is full; a larger tensor has a file of its own."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of files with weights, which are not copied."""
_LEFT_OUT = ("config.json", INDEX, "pytorch_model.bin.index.json", "state.json", "SHA256SUMS")
"""Other files that are not copied: they describe the source's own files."""
_NO_LINEAR = ("norm", "embed_tokens")
"""Kinds of modules that no engine would quantize, listed or not."""
_SCALE = re.compile(r"(.*\.layers\.(\d+)\.self_attn)\.(?:attn\.)?([qkv])_scale")
"""Names of KV scales in a checkpoint, under a wrapper too."""
_ROLES: dict[str, Role] = {str(role): role for role in ROLES}
_TO_HF = "examples/converters/convert_{}_to_hf.py of NeMo RL"


@dataclass(frozen=True)
class Export:
    """An export that has been checked and can be written."""

    checkpoint: Path
    """Folder of the BF16 model."""
    config: Mapping[str, Any]
    """Its ``config.json``."""
    recipe: Recipe
    """Recipe of the rollouts."""
    policy: PinPolicy
    """Precision of each module."""
    files: Mapping[Path, Sequence[str]]
    """Names of the tensors to read from each file, without KV scales."""
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
        experts = _experts(self.config)
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
        alone = [*left_alone(self.policy, _experts(self.config)), *self.beside]
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
        ModelError: no such model, or a file that cannot be read.
        UnsupportedError: a checkpoint of another kind, a model or a size that is not served.
        ScaleError: a KV scale that is missing, unknown or bad.
        PinError: a pin that matches nothing or splits a fused module.
        OptionError: a recipe that leaves everything in BF16.
    """
    stored = _stored_model(checkpoint)
    if not recipe.rollout:
        raise OptionError(
            "The recipe has rollout: false, which leaves every weight in BF16; give the recipe of "
            "an FP8 rollout with --recipe."
        )
    config = folder_config(checkpoint)
    if "quantization_config" in config or "quantization_config" in language_config(config):
        raise UnsupportedError(
            f"'{checkpoint}' is quantized already ('quantization_config' in its config.json); give "
            "the BF16 model that it was made from."
        )
    reason = unsupported_reason(config, rollout=True, training=False)
    if reason is not None:
        raise UnsupportedError(f"'{checkpoint}' is {reason}; give a model that FP8 rollouts serve.")
    try:
        names = module_names(config)
    except KeyError as error:
        raise ModelError(
            f"'{checkpoint / 'config.json'}' has no key {error}; download the model again."
        ) from None
    policy = (plugins or PluginManager(discover=False)).pin_policy(recipe.pins, names)
    _check_experts(policy)
    files: dict[Path, list[str]] = {}
    for name, file in stored.items():
        files.setdefault(file, [])
        if _SCALE.fullmatch(name) is None:
            files[file].append(name)
    scales = _kv_scales(stored, kv_scales, config, names, recipe)
    beside = _beside(stored, names)
    export = Export(checkpoint, config, recipe, policy, files, beside, scales)
    _check_tensors(export)
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
        ModelError: a tensor that has NaN or infinities, or a source that cannot be read.
    """
    if out.exists() or out.is_symlink():
        raise OptionError(f"'{out}' exists; give a folder that does not, or remove it first.")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_weights(export, partial, device, shard_bytes, progress)
        _write_config(export, partial)
        mode = (partial / "config.json").stat().st_mode
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)  # safetensors gives access to the owner alone
        for file in (*partial.iterdir(), partial):
            _sync(file)
        partial.rename(out)
        _sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise OptionError(
            f"'{out}' cannot be written ({getattr(error, 'strerror', None) or error}); give a "
            "folder with enough space that you may write to."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    match = _SCALE.fullmatch(stored)
    return scale_name(int(match[2]), _ROLES[match[3]]) if match else None


def read_kv_scales(file: Path) -> dict[tuple[int, Role], float]:
    """Read KV scales from a JSON object or a safetensors file, by layer and role.

    Raises:
        ScaleError: the file cannot be read, has another name in it, or a bad value.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stored:
                found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        else:
            found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ScaleError(
            f"KV scales cannot be read from '{file}' ({error}); give a JSON object or a "
            "safetensors file of names and values."
        ) from None
    if not isinstance(found, dict):
        raise ScaleError(f"'{file}' is no JSON object of names and KV scales; correct it.")
    return _named_scales(found)


def _named_scales(found: Mapping[str, Any]) -> dict[tuple[int, Role], float]:
    """Check scales and order them by layer and role."""
    scales = {}
    for name, value in found.items():
        match = _SCALE.fullmatch(name)
        if match is None:
            raise ScaleError(f"'{name}' is no KV scale; names look like '{scale_name(0, 'k')}'.")
        if not isinstance(value, float | torch.Tensor):
            raise ScaleError(f"KV scale '{name}' is {value!r}; write a number such as 0.0625.")
        scales[int(match[2]), _ROLES[match[3]]] = check_scale(name, value)
    return scales


def _kv_scales(
    stored: Mapping[str, Path],
    given: Path | None,
    config: Mapping[str, Any],
    names: Sequence[str],
    recipe: Recipe,
) -> dict[str, float]:
    """Scales of the given file, or else of the checkpoint; complete if the recipe needs them."""
    if given is not None:
        scales = read_kv_scales(given)
    else:
        tensors = {}
        for name, file in stored.items():
            if _SCALE.fullmatch(name) is not None:
                with _opened(file) as source:
                    tensors[name] = source.get_tensor(name)
        scales = _named_scales(tensors)
    family, text = family_of(config), language_config(config)
    assert family is not None  # or it would have been refused
    prefix = f"{family.wrapper if text is not config else 'model.'}layers."
    caches = [block_of(family, text, n).kv for n in range(text["num_hidden_layers"])]
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
    unknown = next((place for place in scales if place not in known), None)
    if unknown is not None:
        raise ScaleError(
            f"KV scale '{scale_name(*unknown)}' belongs to no layer of the model with a KV cache "
            "of keys and values; remove it."
        )
    if recipe.kv_cache.has_scales:
        for (layer, role), name in known.items():
            if role != "q" and (layer, role) not in scales:
                raise ScaleError(
                    f"The recipe has kv_cache.dtype '{recipe.kv_cache.dtype}', but there is no KV "
                    f"scale '{name}'; give a file of vllm_fp8rl.calibration.calibrate_kv_scales "
                    "with --kv-scales, or set kv_cache.dtype to auto."
                )
    return {name: scales[place] for place, name in known.items() if place in scales}


def _stored_model(folder: Path) -> dict[str, Path]:
    """Tensors of a model's folder, with their files. What is no such folder is refused.

    Raises:
        ModelError: nothing of the kind is there.
        UnsupportedError: a checkpoint that cannot be read without its engine.
    """
    if not folder.is_dir():
        raise ModelError(f"'{folder}' is no folder; give the folder of a Hugging Face model.")
    stored = folder_tensors(folder)
    if stored is not None and (folder / "config.json").is_file():
        return stored
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
    lacking = "model.safetensors" if stored is None else "config.json"
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


def _check_tensors(export: Export) -> None:
    """Refuse weights that are missing, or that stock engines do not serve in block FP8."""
    found: set[str] = set()
    for file, names in export.files.items():
        with _opened(file) as source:
            stored = set(source.keys())
            for name in names:
                if name not in stored:
                    raise ModelError(
                        f"'{file}' lacks '{name}', which '{INDEX}' says is in it; download the "
                        "model again."
                    )
                parts = export.parts(name)
                if not parts:
                    continue
                about = source.get_slice(name)
                shape, dtype = about.get_shape(), about.get_dtype()
                if dtype not in ("BF16", "F16", "F32"):
                    raise UnsupportedError(
                        f"'{name}' has dtype {dtype}; FP8 is made of BF16 weights, so give the "
                        "BF16 model."
                    )
                for part, matrix in _matrices(name, parts, shape):
                    _check_shape(part, matrix)
                found.update(parts)
    wanted = (f"{row.name}.weight" for row in export.policy.report() if row.precision == "fp8")
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise ModelError(
            f"'{export.checkpoint}' has no tensor '{missing}', which its config.json says it has; "
            "download the model again."
        )


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


def _check_experts(policy: PinPolicy) -> None:
    """Refuse pins of a part of a layer's experts, which engines hold in one precision."""
    found: dict[str, str] = {}
    for row in policy.report():
        container = _experts_of(row.name)
        if container and found.setdefault(container, row.precision) != row.precision:
            raise UnsupportedError(
                f"The pins keep a part of '{container}' in BF16, but engines hold all experts of a "
                f"layer in one precision; pin '{container}.*' with pins.names, or none of it."
            )


def _check_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 2:
        raise UnsupportedError(
            f"'{name}' has shape {list(shape)}, but block FP8 is for matrices; pin it to BF16 with "
            "pins.names."
        )
    rows, columns = shape
    leaf = name.split(".")[-2]
    fused = next((fused for fused, parts in FUSED.items() if leaf in parts), None)
    if columns % BLOCK[1]:
        raise UnsupportedError(
            f"'{name}' has {columns} columns, no multiple of {BLOCK[1]}, which the FP8 kernels of "
            "stock engines need; pin it to BF16 with pins.names."
        )
    last = fused is not None and leaf == FUSED[fused][-1]  # it may end in a part of a block
    if fused is not None and not last and rows % BLOCK[0]:
        raise UnsupportedError(
            f"'{name}' has {rows} rows, no multiple of {BLOCK[0]}, and engines fuse it into "
            f"'{fused}', where its blocks would not fit; pin all of {', '.join(FUSED[fused])} to "
            f"BF16 with pins.kinds: {fused}."
        )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    family = family_of(config)
    return family.experts if family is not None else None


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
        with _opened(file) as source:
            for name in names:
                try:
                    tensor = source.get_tensor(name)
                except SafetensorError as error:
                    raise ModelError(
                        f"'{name}' cannot be read from '{file}' ({error}); download the "
                        "model again."
                    ) from None
                if tensor.is_floating_point() and not all_finite([tensor])[0]:
                    raise ModelError(
                        f"'{name}' in '{file}' has NaN or infinite values; give a checkpoint from "
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
    for file in sorted(export.checkpoint.iterdir()):
        hidden = file.name.startswith(".") or file.name in (*_LEFT_OUT, RECIPE_FILE)
        if file.is_file() and not hidden and file.suffix not in _WEIGHTS:
            shutil.copy2(file, folder)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"'{file}' is no whole safetensors file ({error}); download the model again."
        ) from None


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
