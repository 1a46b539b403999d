"""Many names in one short line, for logs and errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def listed(names: Iterable[str], most: int = 400) -> str:
    """Write names in one line; those that differ in their numbers alone become one pattern.

    Args:
        names: names of modules or tensors, e.g. ``model.layers.3.mlp.down_proj``; text behind a
            name stays with it.
        most: number of characters behind which the rest is only counted; the first is always there.

    Returns:
        E.g. ``model.layers.{0-28, 30}.mlp.down_proj, lm_head``; empty without names.
    """
    patterns = list(_patterns(names))
    shown = ""
    for number, (pattern, _) in enumerate(patterns):
        longer = f"{shown}, {pattern}" if shown else pattern
        if shown and len(longer) > most:
            return f"{shown} and {sum(count for _, count in patterns[number:])} more"
        shown = longer
    return shown


def _patterns(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield patterns in the order of their first names, with the number of names of each."""
    alike: dict[str, list[tuple[str, ...]]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(_NUMBER.sub("{}", name), []).append(tuple(_NUMBER.findall(name)))
    for pattern, numbers in alike.items():
        counts = dict.fromkeys(numbers, 1)
        for place in reversed(range(len(numbers[0]))):  # experts first, then layers that are alike
            counts = _joined(counts, place)
        for filled, count in counts.items():
            yield _fill(pattern, filled), count


def _joined(counts: dict[tuple[str, ...], int], place: int) -> dict[tuple[str, ...], int]:
    """Join the entries that differ at one place only."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for numbers in counts:
        groups.setdefault((*numbers[:place], *numbers[place + 1 :]), []).append(numbers)
    joined = {}
    for group in groups.values():
        if len(group) == 1:
            joined[group[0]] = counts[group[0]]
            continue
        ranges = f"{{{number_ranges(int(numbers[place]) for numbers in group)}}}"
        key = (*group[0][:place], ranges, *group[0][place + 1 :])
        joined[key] = sum(counts[numbers] for numbers in group)
    return joined


def _fill(pattern: str, numbers: tuple[str, ...]) -> str:
    parts = pattern.split("{}")
    return "".join(text for pair in zip(parts, (*numbers, ""), strict=True) for text in pair)


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order with runs joined, e.g. ``0-3, 7``."""
    parts = []
    ordered = sorted(set(numbers))
    for _, run in groupby(enumerate(ordered), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(parts)
