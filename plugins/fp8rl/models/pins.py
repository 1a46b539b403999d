"""`PinPolicy`: which modules run in FP8 and which stay in BF16.

One policy drives trainer, refit and rollout, so it uses *global* HF module names
(``model.layers.3.mlp.down_proj``); an engine translates its own names before it asks. Everything is
decided when the policy is made, against the whole model, so that a pipeline rank with four layers
still notices a pin that matches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NoReturn

from fp8rl.errors import PinError
from fp8rl.listing import listed
from fp8rl.models.families import FUSED, default_reason, kind_of, tower_of
from fp8rl.recipe import ModuleKind, Pins

Precision = Literal["fp8", "bf16"]

ALWAYS_BF16: frozenset[ModuleKind] = frozenset(
    {"lm_head", "embed_tokens", "norm", "router", "conv1d", "tower"}
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the global layer number in an HF module name, or None outside the decoder layers.

    Multi-token-prediction layers (``mtp.layers.N``) are no decoder layers: pins match them by name
    and kind alone.
    """
    match = None if name.startswith("mtp.") else _LAYER.search(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class PinRow:
    """The precision of one module."""

    name: str
    layer: int | None
    kind: ModuleKind
    precision: Precision
    reason: str
    """The pin or default that keeps the module in BF16, e.g. ``layers: -1``; empty for FP8."""


class PinPolicy:
    """The resolved pins of one model.

    Args:
        pins: pins of the recipe and of plugins.
        module_names: HF names of *all* modules of the model, on all pipeline ranks.

    Raises:
        PinError: a pin matches nothing, a layer number is out of range, or a pin covers only a
            part of a fused module (qkv, gate_up).
    """

    def __init__(self, pins: Pins, module_names: Iterable[str]) -> None:
        self.pins = pins
        names = list(dict.fromkeys(module_names))
        layers = sorted({n for n in map(layer_of, names) if n is not None})
        self.num_layers = layers[-1] + 1 if layers else 0
        self._matched = self._match(pins, names)
        self._fp8 = self._unpinned(pins, names)
        self._rows = {name: self._resolve(name) for name in names}
        self._check_fused()

    def precision(self, name: str) -> Precision:
        """``fp8`` or ``bf16`` for a global module name; fused names (``qkv_proj``) work too.

        Raises:
            PinError: the model has no module of that name.
        """
        return self.row(name).precision

    def row(self, name: str) -> PinRow:
        """Return the resolved row of a module, or of the first part of a fused module.

        Raises:
            PinError: the model has no module of that name.
        """
        for known in (name, tower_of(name)):
            if known in self._rows:
                return self._rows[known]
        prefix, _, leaf = name.rpartition(".")
        for part in FUSED.get(leaf, ())[:1]:
            unfused = f"{prefix}.{part}" if prefix else part
            if unfused in self._rows:
                return self._rows[unfused]
        raise PinError(
            f"Module '{name}' is not in the model that the pins were resolved for "
            f"({self.num_layers} layers); give PinPolicy the names of the whole model."
        )

    def report(self) -> list[PinRow]:
        """Return the resolved rows of all modules, in model order."""
        return list(self._rows.values())

    def bf16_linears(self) -> list[str]:
        """Return the names of the pinned modules, without modules that are always BF16."""
        return [
            row.name
            for row in self._rows.values()
            if row.precision == "bf16" and row.kind not in ALWAYS_BF16
        ]

    def summary(self) -> str:
        """Return one line for a log: how many linear modules are in FP8, and which are pinned."""
        linears = [row for row in self._rows.values() if row.kind not in ALWAYS_BF16]
        fp8 = sum(row.precision == "fp8" for row in linears)
        pinned = listed(self.bf16_linears()) or "none"
        return f"fp8rl: {fp8} of {len(linears)} linear modules in FP8; pinned to BF16: {pinned}"

    def _match(self, pins: Pins, names: Sequence[str]) -> dict[str, set[str]]:
        """Return the names that each pin matches; a pin is written as its key and its value."""
        layers: dict[str, range] = {}
        for number in pins.layers:
            index = number + self.num_layers if number < 0 else number
            if not 0 <= index < self.num_layers:
                raise PinError(
                    f"pins.layers: {number} matches nothing, the model has layers 0 to "
                    f"{self.num_layers - 1} (or -{self.num_layers} to -1)."
                )
            layers[f"layers: {number}"] = range(index, index + 1)
        for key, count, first in (
            ("first", pins.first, 0),
            ("last", pins.last, self.num_layers - pins.last),
        ):
            if count > self.num_layers:
                raise PinError(
                    f"pins.{key}: {count} is more than the model's {self.num_layers} layers."
                )
            if count:
                layers[f"{key}: {count}"] = range(first, first + count)
        matched = {pin: {n for n in names if layer_of(n) in span} for pin, span in layers.items()}
        for glob in pins.names:
            matched[f"names: {glob}"] = {n for n in names if fnmatchcase(n, glob)}
        for kind in pins.kinds:
            matched[f"kinds: {kind}"] = {n for n in names if kind_of(n) == kind}
        for pin, found in matched.items():
            if not found:
                example = next((n for n in names if layer_of(n) is not None), "none")
                raise PinError(
                    f"pins.{pin} matches no module of the model; names look like '{example}'."
                )
        return matched

    def _unpinned(self, pins: Pins, names: Sequence[str]) -> set[str]:
        """Return the modules that ``pins.fp8`` takes out of the family's defaults."""
        defaults = {name for name in names if default_reason(name)}
        found = {glob: {n for n in defaults if fnmatchcase(n, glob)} for glob in pins.fp8}
        for glob, matched in found.items():
            if not matched:
                raise PinError(
                    f"pins.fp8: {glob} matches no module that is in BF16 by default; these are "
                    f"{', '.join(sorted({n.rpartition('.')[2] for n in defaults})) or 'none'} in "
                    "this model."
                )
        return set().union(*found.values())

    def _resolve(self, name: str) -> PinRow:
        layer, kind = layer_of(name), kind_of(name)
        if kind in ALWAYS_BF16:
            return PinRow(name, layer, kind, "bf16", f"always: {kind}")
        reason = next((pin for pin, found in self._matched.items() if name in found), "")
        if not reason and (why := default_reason(name)) and name not in self._fp8:
            reason = f"default: {why}"
        return PinRow(name, layer, kind, "bf16" if reason else "fp8", reason)

    def _check_fused(self) -> None:
        for name, row in self._rows.items():
            leaf = name.rpartition(".")[2]
            prefix = name.removesuffix(leaf)
            for fused, parts in FUSED.items():
                if leaf != parts[0]:
                    continue
                group = [self._rows.get(prefix + part) for part in parts]
                differing = [r for r in group if r is not None and r.precision != row.precision]
                if differing:
                    pinned = row if row.precision == "bf16" else differing[0]
                    self._refuse_part(pinned, f"{prefix}{fused}", parts)

    def _refuse_part(self, pinned: PinRow, fused: str, parts: Sequence[str]) -> NoReturn:
        kind, names = pinned.kind, ", ".join(parts)
        if default_reason(pinned.name):
            raise PinError(
                f"pins.fp8 leaves '{pinned.name}' in BF16 but not all parts of the fused "
                f"'{fused}'; name all of {names} in pins.fp8, or none."
            )
        raise PinError(
            f"pins.{pinned.reason} pins '{pinned.name}' but not all parts of the fused '{fused}'; "
            f"pin all of {names} or use kinds: {kind}."
        )
