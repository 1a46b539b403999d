"""Read JSON, YAML and keys that people write by hand, with errors that name the key."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

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
    """Parse a JSON text, whose name ``where`` an error puts before each key.

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


_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Reads plain words and numbers as YAML 1.2 does; PyYAML follows YAML 1.1, in which ``off`` is
    false, ``2026-11-28`` a date and ``1e-4`` a string."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in (f"{_TAG}bool", f"{_TAG}timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+|\.[0-9]+)$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_NUMERIC = (f"{_TAG}int", f"{_TAG}float")
_NUMBER = re.compile(
    r"0x[0-9a-fA-F]+$|[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|"
    r"[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
"""Plain values that are numbers in YAML 1.2, with :data:`_OCTAL`."""
_OCTAL = re.compile(r"[-+]?0[0-9]+$|0o[0-7]+$")
"""Those of them that are other numbers, or text, in YAML 1.1."""


def parse_yaml(text: str, where: str, *, block: str | None = None) -> Any:
    """Parse a YAML text by the rules of YAML 1.2, equal to JSON's where both have one.

    Args:
        text: YAML text.
        where: name of the text, e.g. its path; an error puts it before each key.
        block: key of the mappings that fp8rl reads; by default it reads all of the text. Outside of
            them numbers of YAML 1.1 are accepted, as their reader may follow it.

    Raises:
        RecipeError: not valid YAML, a mapping with a key twice, or a number that YAML 1.1 and 1.2
            read differently (``010``, ``1_000``, ``1:30``).
    """
    try:
        root = yaml.compose(text, _Loader)
        if root is not None:
            _check_nodes(root, where, block, set())
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


def _check_nodes(
    node: yaml.Node, path: str, block: str | None, seen: set[tuple[int, str | None]]
) -> None:
    """Raise RecipeError for a key twice, of which PyYAML would keep the last one, and for a number
    that depends on the version of YAML.

    Args:
        node: node of PyYAML's tree.
        path: path of the node.
        block: see :func:`parse_yaml`; None within such a mapping.
        seen: ids of the visited nodes, each with the block; an alias may lead back to one of them.
    """
    if (id(node), block) in seen:
        return
    seen.add((id(node), block))
    if isinstance(node, yaml.ScalarNode):
        plain = node.style is None or node.tag in _NUMERIC
        if block is None and plain and _depends_on_version(node.value):
            raise RecipeError(
                f"'{path}' is {printable(node.value)}, which YAML 1.1 and YAML 1.2 read "
                "differently; write the number without leading zeros, underscores and colons, or "
                "put quotes around what is text."
            )
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _check_nodes(value, f"{path}.{index}", block, seen)
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
            _check_nodes(value, inner, None if key.value == block else block, seen)


def _depends_on_version(text: str) -> bool:
    """Tell whether a plain value is a number in one version of YAML, and another or text in one."""
    resolvers = _Loader.yaml_implicit_resolvers.get(text[:1], ())
    number = any(tag in _NUMERIC and pattern.match(text) for tag, pattern in resolvers)
    return number != bool(_NUMBER.match(text)) or bool(_OCTAL.match(text))


def explain(error: ValidationError, where: str, model: type[BaseModel] | None = None) -> str:
    """Say what is wrong with a mapping at ``where``, in one line with every key's full path.

    The keys of the ``model`` that it was to fit are offered for a misspelled one.
    """
    parts = []
    for item in error.errors():
        loc = [printable(str(part)) for part in item["loc"]]
        key = ".".join([where, *loc])
        said = item["msg"].removeprefix("Value error, ")
        wanted = said.removeprefix("Input should be ")
        if item["type"] == "extra_forbidden":
            meant = _keys_meant(loc, _dotted(model) if model is not None else [])
            remedy = _either(f"{where}.{name}" for name in meant)
            parts.append(
                f"unknown key '{key}' "
                + (f"(write {remedy})" if meant else "(remove it or correct its spelling)")
            )
        elif wanted != said:
            wanted = wanted.replace("a valid tuple", "a list").partition(" or instance of ")[0]
            wanted = wanted.replace("a valid boolean", "true or false")
            wanted = wanted.replace("a valid dictionary", "a mapping")
            parts.append(f"'{key}' must be {wanted}, not {_SHORT.repr(item['input'])}")
        else:
            parts.append(f"'{key}': {said}")
    return "; ".join(parts) + "."


def _dotted(model: type[BaseModel], prefix: str = "") -> list[str]:
    """List the keys of a model and of the sections in it, with dots."""
    found = []
    for name, field in model.model_fields.items():
        found.append(f"{prefix}{name}")
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += _dotted(kind, f"{found[-1]}.")
    return found


def _keys_meant(loc: Sequence[str], known: Sequence[str]) -> list[str]:
    """Find the keys that an unknown one may mean: with the same letters anywhere in the model
    (``kv_cache_dtype``, or ``dtype`` without its section), or a similar one of its section."""
    section, key = ".".join(loc[:-1]), loc[-1]
    for same in (
        [name for name in known if _letters(name) in (_letters(key), _letters(".".join(loc)))],
        [name for name in known if _letters(name.rpartition(".")[2]) == _letters(key)],
    ):
        if same:
            return same
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    found = near_miss(key, beside)
    return [beside[found]] if found else []


def _either(names: Iterable[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def printable(text: str) -> str:
    """Shorten a text to one line of at most 200 characters, for an error."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _letters(key: object) -> str:
    return "".join(filter(str.isalnum, str(key).lower()))
