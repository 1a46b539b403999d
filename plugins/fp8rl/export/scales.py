"""KV scales of a checkpoint, or of a file beside it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path

from fp8rl.errors import Fp8RLError, ScaleError, UnsupportedError
from fp8rl.export.names import named, with_verb
from fp8rl.kv_scales import ROLES, Role, check_scale, parse_scale_name, require_one_name, scale_name
from fp8rl.models.families import FAMILIES
from fp8rl.models.spec import ModelSpec
from fp8rl.reading import parse_json, printable
from fp8rl.recipe import Recipe
from fp8rl.weight_files import WeightFile, read_text

_PREFIXES = tuple(dict.fromkeys(("model.", *(f.wrapper for f in FAMILIES if f.wrapper))))
"""What precedes ``layers`` in the names of KV scales."""


def wire_scale_name(stored: str) -> str | None:
    """Return the name on the wire of a KV scale in a checkpoint; None for other tensors."""
    place = place_of(stored)
    return scale_name(*place) if place else None


def place_of(name: str) -> tuple[int, Role] | None:
    """Layer and role of a KV scale in a checkpoint, under a wrapper too; None for other tensors."""
    found = (parse_scale_name(name, prefix) for prefix in _PREFIXES)
    return next(filter(None, found), None)


def read_scales(file: Path) -> dict[str, float]:
    """Read KV scales from a JSON object or a safetensors file; whatever is bad is a ScaleError."""
    try:
        if file.suffix == ".safetensors":
            source = WeightFile(file)
            return one_value_each(dict.fromkeys(source.tensors, source))
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


def one_value_each(places: Mapping[str, WeightFile]) -> dict[str, float]:
    """Read KV scales, by name, from the file of each; ScaleError for a bad one."""
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


def served_scales(given: Mapping[str, float], spec: ModelSpec, recipe: Recipe) -> dict[str, float]:
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
    places = {name: place_of(name) for name in given}
    own = ("model.layers.", prefix)
    bad = [name for name, place in places.items() if not place or not name.startswith(own)]
    if bad:
        raise ScaleError(
            f"{with_verb(bad, 'is', 'are')} no KV scale; names look like '{scale_name(0, 'k')}'."
        )
    names = require_one_name((name, place) for name, place in places.items() if place)
    unknown = [name for place, name in names.items() if place not in known]
    if unknown:
        raise ScaleError(
            f"{with_verb(unknown, 'belongs', 'belong')} to no layer of the model with "
            "a KV cache of keys and values; give a file of the scales of this model with "
            "--kv-scales."
        )
    missing = [n for place, n in known.items() if place[1] != "q" and place not in names]
    if missing and recipe.kv_cache.has_scales:
        raise ScaleError(
            f"The recipe has kv_cache.dtype '{recipe.kv_cache.dtype}', but there is no KV scale "
            f"{named(missing)}; give a file of vllm_fp8rl.calibration.calibrate_kv_scales with "
            "--kv-scales, or set kv_cache.dtype to auto."
        )
    return {name: given[names[place]] for place, name in known.items() if place in names}
