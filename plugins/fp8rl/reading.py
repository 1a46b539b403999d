"""Read JSON, YAML and keys that people write by hand, with errors that name the key."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic import ValidationError

from fp8rl.errors import RecipeError

_TOO_DEEP = "it is nested too deeply"
_DEEPEST = 100
"""Levels of JSON that are read; Python's own reader takes more than its writer."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # YAML aliases can make a value of any size


def near_miss(key: object, names: Iterable[str], *, cutoff: float = 0.8) -> str | None:
    """Find the name that a misspelled key means; case and punctuation are ignored.

    Args:
        key: key as it was written.
        names: known names.
        cutoff: share of equal letters (``difflib``). With 1 only case and punctuation may differ; a
            lower value also accepts a name with a prefix or suffix (``fp8rl_cfg``).

    Returns:
        The name, also if ``key`` equals it; None if no name is similar.
    """
    plain, letters = {_letters(name): name for name in names}, _letters(key)
    found = get_close_matches(letters, plain, n=1, cutoff=cutoff)
    if cutoff < 1:
        found += [name for name in plain if name in letters]
    return plain[found[0]] if found else None


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text.

    Args:
        text: JSON text.
        where: name of the text, e.g. its path; an error puts it before each key.

    Raises:
        RecipeError: not valid JSON, an object with a key twice, or more than 100 levels.
    """
    try:
        return _without_duplicates(json.loads(text, object_pairs_hook=_Pairs), where, _DEEPEST)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{where} is not valid JSON: {error}.") from None
    except RecursionError:
        raise RecipeError(f"{where} is not valid JSON: {_TOO_DEEP}.") from None


class _Pairs(list):
    """Keys and values of a JSON object, in order, with duplicates."""


def _without_duplicates(node: Any, path: str, levels: int) -> Any:
    """Convert to plain dicts and lists.

    Raises:
        RecipeError: a key is given twice, where a dict would silently keep the last one.
        RecursionError: there are more than so many levels.
    """
    if not levels:
        raise RecursionError
    if isinstance(node, _Pairs):
        found: dict[str, Any] = {}
        for key, value in node:
            if key in found:
                raise RecipeError(f"'{path}.{printable(key)}' is given twice; keep one of them.")
            found[key] = _without_duplicates(value, f"{path}.{printable(key)}", levels - 1)
        return found
    if isinstance(node, list):
        return [
            _without_duplicates(value, f"{path}.{index}", levels - 1)
            for index, value in enumerate(node)
        ]
    return node


class _Loader(yaml.SafeLoader):
    """Reads ``1e-4`` and ``1.5e3`` as numbers, as YAML 1.2 does; PyYAML reads strings."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; see :func:`parse_json` for the arguments.

    Raises:
        RecipeError: not valid YAML, or a mapping with a key twice.
    """
    try:
        root = yaml.compose(text, _Loader)
        if root is not None:
            _refuse_duplicates(root, where, set())
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{where} is not valid YAML{place}: {what}.") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{where} is not valid YAML at line {line}: character #x{error.character:04x} is "
            "not allowed."
        ) from None
    except RecipeError:
        raise
    except RecursionError:
        raise RecipeError(f"{where} is not valid YAML: {_TOO_DEEP}.") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's constructors of numbers, dates and tagged values raise these.
        raise RecipeError(f"{where} holds a value that YAML cannot read: {error}.") from None


def _refuse_duplicates(node: yaml.Node, path: str, seen: set[int]) -> None:
    """Raise RecipeError if a mapping has a key twice; PyYAML would keep the last one.

    Args:
        node: node of PyYAML's tree.
        path: path of the node.
        seen: ids of the visited nodes; an alias may lead back to one of them.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _refuse_duplicates(value, f"{path}.{index}", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the constructor refuses it: a list is no key
            name, line = (key.tag, key.value), key.start_mark.line + 1
            inner = f"{path}.{printable(key.value)}"
            if name in lines:
                raise RecipeError(
                    f"'{inner}' is given twice, in lines {lines[name]} and {line}; keep one of "
                    "them."
                )
            lines[name] = line
            _refuse_duplicates(value, inner, seen)


def explain(error: ValidationError, where: str) -> str:
    """Say what is wrong with a mapping, in one line with every key's full path.

    Args:
        error: error of pydantic.
        where: path of the mapping.
    """
    parts = []
    for item in error.errors():
        key = ".".join([where, *(printable(str(part)) for part in item["loc"])])
        said = item["msg"].removeprefix("Value error, ")
        wanted = said.removeprefix("Input should be ")
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key '{key}' (remove it or correct its spelling)")
        elif wanted != said:
            wanted = wanted.replace("a valid tuple", "a list").partition(" or instance of ")[0]
            parts.append(f"'{key}' must be {wanted}, not {_SHORT.repr(item['input'])}")
        else:
            parts.append(f"'{key}': {said}")
    return "; ".join(parts) + "."


def printable(text: str) -> str:
    """Shorten a text to one line of at most 200 characters, for an error."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _letters(key: object) -> str:
    return "".join(filter(str.isalnum, str(key).lower()))
