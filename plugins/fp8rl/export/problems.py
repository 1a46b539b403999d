"""What stock engines do not serve of a checkpoint, before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fp8rl.errors import Fp8RLError, ModelError, UnsupportedError
from fp8rl.export.format import Export
from fp8rl.export.names import experts_of, matrices, named, with_verb
from fp8rl.models.families import FUSED
from fp8rl.models.folder import is_own
from fp8rl.models.pins import PinPolicy
from fp8rl.numerics import BLOCK
from fp8rl.weight_files import Watched

_OF_CODES = re.compile(
    r".*(?:_scale_inv|\.weight_scale\w*|\.\w*(?:put|activation)_scale|\.(?:kv|[qkv])_scale"
    r"|\.[qkv]_zero_point|\.[qkv](?:_cache)?\.scale)"
)
"""Names of tensors that engines read as scales, of weights, activations or a KV cache."""


def problems_of_scales(names: Sequence[str]) -> list[Fp8RLError]:
    """Return errors for tensors that engines would read in the place of written scales."""
    found = [name for name in names if _OF_CODES.fullmatch(name)]
    if not found:
        return []
    return [
        UnsupportedError(
            f"{with_verb(found, 'is', 'are')} stored beside the weights, as in a quantized model; "
            "give the BF16 model that it was made from, or store this one without them."
        )
    ]


def problems_of_links(sources: Sequence[Watched]) -> list[Fp8RLError]:
    """Links that lead out of the folder: what is there may be anybody's."""
    out = [source.path for source in sources if not is_own(source.path)]
    if not out:
        return []
    links = named([f"{path.name} -> {path.resolve()}" for path in out])
    return [
        ModelError(
            f"'{out[0].parent}' has links that lead out of it, and not into its Hugging Face "
            f"cache: {links}; copy what belongs to the model to its place (cp -rL, once you have "
            "looked at the links), and remove the others."
        )
    ]


def problems_of_experts(policy: PinPolicy) -> list[Fp8RLError]:
    """Pins of a part of a layer's experts, which engines hold in one precision."""
    found: dict[str, set[str]] = {}
    for row in policy.report():
        if container := experts_of(row.name):
            found.setdefault(container, set()).add(row.precision)
    split = [container for container, precisions in found.items() if len(precisions) > 1]
    if not split:
        return []
    return [
        UnsupportedError(
            f"The pins keep a part of {named(split)} in BF16, but engines hold all experts of a "
            f"layer in one precision; pin '{split[0]}.*' with pins.names, or none of it."
        )
    ]


def problems_of_tensors(export: Export) -> list[Fp8RLError]:
    """Return errors for weights that are missing, there twice, or not served in block FP8."""
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
                for part, shape in matrices(name, parts, about.shape):
                    if why := _misfit(part, shape):
                        misfits.setdefault(why, []).append(part)
            except UnsupportedError as error:
                unsplit.append(error)
    problems: list[Fp8RLError] = [*unsplit[:1]]
    if twice := [held for held in holders.values() if len(held) > 1]:
        problems.append(UnsupportedError(f"{named(twice[0])} hold one weight; store it once."))
    if dtypes:
        kinds = ", ".join(sorted(set(dtypes.values())))
        problems.append(
            UnsupportedError(
                f"{with_verb(list(dtypes), 'has', 'have')} dtype {kinds}; FP8 is made of BF16 "
                "weights, so give the BF16 model."
            )
        )
    if misfits:
        problems.append(_misfitting(export.policy, misfits))
    fp8 = (f"{row.name}.weight" for row in export.policy.report() if row.precision == "fp8")
    if missing := [name for name in fp8 if name not in holders]:
        problems.append(
            ModelError(
                f"'{export.checkpoint}' has no tensor {named(missing)}, which its config.json "
                "says it has; download the model again."
            )
        )
    return problems


def _misfitting(policy: PinPolicy, misfits: Mapping[str, Sequence[str]]) -> UnsupportedError:
    """Return the error for weights that block FP8 does not serve, with the pins that mend it."""
    listed = "; ".join(f"{with_verb(names, 'has', 'have')} {why}" for why, names in misfits.items())
    bad = {name.removesuffix(".weight") for names in misfits.values() for name in names}
    units = {_unit(name) for name in bad}
    rows = [row for row in policy.report() if row.precision == "fp8"]
    pinned = [row for row in rows if _unit(row.name) in units]
    if len(pinned) == len(rows):
        remedy = "which leaves no weight for FP8: serve this model in BF16"
    else:
        kinds = {row.kind for row in pinned} - {row.kind for row in rows if row not in pinned}
        names = [
            f"{container}.*" if (container := experts_of(row.name)) else row.name
            for row in pinned
            if row.kind not in kinds
        ]
        pins: dict[str, list[str]] = {"kinds": sorted(kinds), "names": [*dict.fromkeys(names)]}
        text = ", ".join(f"{key}: [{', '.join(found)}]" for key, found in pins.items() if found)
        remedy = f"add to the pins of the recipe, which keep them in BF16: {{{text}}}"
    return UnsupportedError(f"Stock engines do not serve in block FP8: {listed}; {remedy}.")


def _unit(module: str) -> str:
    """Return what an engine holds in one precision: a module, a fused one, or all experts."""
    prefix, _, leaf = module.rpartition(".")
    fused = next((fused for fused, parts in FUSED.items() if leaf in parts), leaf)
    return experts_of(module) or f"{prefix}.{fused}"


def _misfit(name: str, shape: Sequence[int]) -> str:
    """Say what block FP8 of stock engines does not serve in a weight; empty: it does."""
    if len(shape) != 2:
        return f"shape {list(shape)}, no matrix"
    rows, columns = shape
    # On a GPU vLLM quantizes activations in whole groups alone (per_token_group_quant_fp8).
    if columns % BLOCK[1]:
        return f"{columns} columns, no multiple of {BLOCK[1]}"
    leaf = name.split(".")[-2]
    fused = next((fused for fused, parts in FUSED.items() if leaf in parts[:-1]), None)
    if fused is not None and rows % BLOCK[0]:  # the last one may end in a part of a block
        return f"{rows} rows, no multiple of {BLOCK[0]}, where engines fuse it into '{fused}'"
    return ""
