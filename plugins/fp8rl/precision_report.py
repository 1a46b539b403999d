"""The one rendering of resolved pins: which layers run which modules in FP8 or BF16, and why.

The log of an engine takes :func:`precision_text`; ``fp8rl doctor`` takes :func:`precision_section`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from fp8rl.listing import number_ranges
from fp8rl.models.pins import PinRow, Precision
from fp8rl.plugins.adapters import Section


class PrecisionLine(NamedTuple):
    """Decoder layers that are treated alike."""

    layers: str
    """Layer numbers, e.g. ``0-2, 5``; empty for the modules outside the decoder layers."""
    fp8: str
    """Kinds of modules in FP8."""
    bf16: str
    """Kinds of modules in BF16 with the reason, e.g. ``o_proj (last: 1)``; norms are left out."""


def precision_lines(rows: Iterable[PinRow]) -> list[PrecisionLine]:
    """Return the precision of a model's modules, one line for all layers that are treated alike."""
    by_layer: dict[int | None, list[PinRow]] = {}
    for row in rows:
        by_layer.setdefault(row.layer, []).append(row)
    alike: dict[tuple[str, str], list[int]] = {}
    lines = []
    for layer, members in by_layer.items():
        cells = _kinds(members, "fp8"), _kinds(members, "bf16")
        if layer is None:
            lines.append(PrecisionLine("", *cells))
        else:
            alike.setdefault(cells, []).append(layer)
    return lines + [PrecisionLine(number_ranges(n), *cells) for cells, n in alike.items()]


def precision_text(rows: Iterable[PinRow]) -> str:
    """:func:`precision_lines` for a log, e.g. ``layers 0-2: FP8 qkv_proj, o_proj``."""
    lines = []
    for line in precision_lines(rows):
        cells = [f"FP8 {line.fp8}"] if line.fp8 else []
        cells += [f"BF16 {line.bf16}"] if line.bf16 else []
        where = f"layers {line.layers}" if line.layers else "outside the layers"
        lines.append(f"  {where}: {'; '.join(cells)}")
    return "\n".join(lines)


def precision_section(rows: Iterable[PinRow], title: str = "precision of each module") -> Section:
    """:func:`precision_lines` as a table."""
    return Section(
        title,
        ("layers", "FP8", "BF16 (why)"),
        tuple((line.layers or "outside", *line[1:]) for line in precision_lines(rows)),
    )


def _kinds(rows: list[PinRow], precision: Precision) -> str:
    """Kinds of modules of one layer that have this precision, without the norms."""
    total = Counter(row.kind for row in rows)
    chosen = [row for row in rows if row.precision == precision and row.kind != "norm"]
    parts = []
    for (kind, reason), count in Counter((row.kind, row.reason) for row in chosen).items():
        share = f" [{count} of {total[kind]}]" if count < total[kind] else ""
        parts.append(f"{kind}{share} ({reason})" if reason else f"{kind}{share}")
    return ", ".join(parts)
