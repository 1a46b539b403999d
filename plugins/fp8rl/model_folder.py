"""Config and module names of a model, read from a folder in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8rl.errors import ModelError, UnsupportedError
from fp8rl.families import known_type, module_names

INDEX = "model.safetensors.index.json"
"""File that says which file of a model has which tensor."""
RECIPE_FILE = "fp8rl_recipe.json"
"""File in which a checkpoint names the recipe of its run."""


def folder_module_names(folder: Path) -> list[str]:
    """Global names of the modules with weights, in the order of their layers.

    They follow from its ``config.json`` where the table of families knows the model. Of another
    model they are those of the stored tensors; without any, it counts as Llama.

    Raises:
        ModelError: a file is missing, cannot be read, or is not whole.
        UnsupportedError: an MoE model of an unknown family, without weights.
    """
    tensors = folder_tensors(folder)
    if tensors is None:
        try:
            return _names_of_config(folder / "config.json")
        except OSError as error:
            raise _unreadable(folder, error) from None
    config = folder / "config.json"
    if config.is_file() and known_type(_read_object(config)):
        return _names_of_config(config)
    modules = {tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight")}
    if not modules:
        raise ModelError(f"'{folder}' holds no weight; download the model again.")
    return sorted(modules, key=_numeric_order)


def folder_tensors(folder: Path) -> dict[str, Path] | None:
    """Names of the stored tensors, with the safetensors file of each; None without such files.

    Raises:
        ModelError: a file is missing, cannot be read, or is not whole.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    try:
        if index.is_file():
            return _tensors_of_index(index)
        return dict.fromkeys(_tensors_of_file(single), single) if single.is_file() else None
    except OSError as error:
        raise _unreadable(folder, error) from None


def _tensors_of_index(index: Path) -> dict[str, Path]:
    """Tensors that the index of a model in several files lists, with their files."""
    table = _read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise ModelError(
            f"'{index}' has no weight_map from tensors to files; download the model again."
        )
    for file in dict.fromkeys(table.values()):
        if not (index.parent / file).is_file():
            raise ModelError(
                f"'{index}' names '{file}', which is not there; download the model again."
            )
    return {tensor: index.parent / file for tensor, file in table.items()}


def _tensors_of_file(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, which has to be whole."""
    from safetensors import SafetensorError, safe_open  # here: most commands read no weights

    try:
        with safe_open(file, framework="np") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise ModelError(
            f"'{file}' is no whole safetensors file ({error}); download the model again."
        ) from None


def folder_config(folder: Path) -> dict[str, Any]:
    """Values of a model's ``config.json``.

    Raises:
        ModelError: the file is missing, cannot be read, or is no JSON object.
    """
    try:
        return _read_object(folder / "config.json")
    except OSError as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"'{error.filename or folder}' cannot be read ({error.strerror or error}); point "
        "--model at the folder of a Hugging Face model."
    )


def _names_of_config(config: Path) -> list[str]:
    """Names that follow from a model's config."""
    values = _read_object(config)
    try:
        return module_names(values)
    except KeyError as error:
        raise ModelError(
            f"'{config}' has no key {error}; correct it, or give a folder with safetensors."
        ) from None
    except UnsupportedError as error:
        raise UnsupportedError(
            f"'{config.parent}' has no weights to take its module names from. {error}"
        ) from None
    except ModelError as error:
        raise ModelError(f"'{config}': {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' is not valid JSON ({error}); correct it.") from None
    if not isinstance(value, dict):
        raise ModelError(f"'{file}' holds a {type(value).__name__}, not a JSON object; correct it.")
    return value


def _numeric_order(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")]
