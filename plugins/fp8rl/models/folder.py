"""A model's folder in Hugging Face's format: its config, its description, names of its tensors."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.errors import ModelError, RecipeError, UnsupportedError
from fp8rl.models.families import entry_of
from fp8rl.models.spec import ModelSpec
from fp8rl.reading import parse_json, printable
from fp8rl.weight_files import WeightFile, read_text

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
"""File that says which file of a model has which tensor."""
RECIPE_FILE = "fp8rl_recipe.json"
"""File in which a checkpoint names the recipe of its run."""


def local_folder(model: str, *, weights: bool = True) -> Path:
    """Return the folder of a model, after a download, with weights or without, if it is a name.

    Raises:
        ModelError: there is no such folder, and the hub gives no such model, or no access to it.
    """
    if Path(model).is_dir():
        return Path(model).resolve()
    if model.startswith((".", "/")):
        raise ModelError(
            f"'{model}' is no folder; give the folder of a model, or its name on the hub."
        )
    from huggingface_hub import snapshot_download

    kinds = ["json", "jinja", "txt", "model", *(["safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=[f"*.{kind}" for kind in kinds]))
    except Exception as error:  # of many kinds: no network, no such name, no access
        why = (str(error).splitlines() or [type(error).__name__])[0]
        answers = [getattr(e, "response", None) for e in (error, error.__cause__)]
        if {getattr(answer, "status_code", None) for answer in answers} & {401, 403}:
            raise ModelError(
                f"'{model}' is no folder, and the hub gave no access to such a model ({why}); "
                "correct the name, or accept the model's terms on its page and run "
                "'hf auth login', or give the folder of a model."
            ) from None
        raise ModelError(
            f"'{model}' is no folder, and the hub gave no such model ({why}); give the folder of "
            "a model."
        ) from None


def folder_module_names(folder: Path) -> Sequence[str]:
    """Global names of the modules with weights, in the order of their layers.

    They follow from its ``config.json`` where the table of families knows the model. Of another
    model they are those of the stored tensors.

    Raises:
        ModelError: a file is missing, cannot be read, or is not whole.
        UnsupportedError: a model of an unknown family, without weights.
    """
    tensors = folder_tensors(folder)
    if tensors is None:
        try:
            return folder_spec(folder).names
        except UnsupportedError as error:
            raise UnsupportedError(
                f"'{folder}' has no weights to take its module names from. {error}"
            ) from None
    if _is_there(folder / "config.json"):
        values = folder_config(folder)
        kind = (values.get("text_config") or values).get("model_type")
        if kind is not None and entry_of(kind):
            return folder_spec(folder, values).names
    modules = {tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight")}
    if not modules:
        raise ModelError(f"'{folder}' holds no weight; download the model again.")
    return sorted(modules, key=_numeric_order)


def folder_tensors(folder: Path) -> dict[str, Path] | None:
    """Return the names of the stored tensors, each with its safetensors file; None without files.

    Raises:
        ModelError: a file is missing, cannot be read, or is not whole.
    """
    single = folder / "model.safetensors"
    with _readable(folder):
        if (files := read_index(folder)) is not None:
            return files
        return dict.fromkeys(WeightFile(single).tensors, single) if _is_there(single) else None


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the model's tensors from a folder, each into CPU memory, file by file.

    The index says which files these are: others in the folder may hold the weights once more. KV
    scales of the checkpoint stay behind: they are an engine's, and no tensors of the model.

    Raises:
        ModelError: there are no safetensors, or a file is missing, cannot be read, is not whole, or
            holds other tensors than the index lists for it.
    """
    from fp8rl.kv_scales import parse_scale_name  # here: it imports torch

    listed = folder_tensors(folder)
    if listed is None:
        raise ModelError(
            f"'{folder}' has neither model.safetensors nor {INDEX}; give a model with safetensors "
            "under these names."
        )
    with _readable(folder):
        files = [WeightFile(file) for file in dict.fromkeys(listed.values())]
    if _is_there(folder / INDEX):
        require_listed(files, listed)
    for file in files:
        yield from file.read([name for name in file.tensors if parse_scale_name(name) is None])


def read_index(folder: Path) -> dict[str, Path] | None:
    """Return the tensors that the index of a folder lists, with their files; None without an index.

    Raises:
        ModelError: it is no index of files in its folder.
        OSError: it cannot be read.
    """
    index = folder / INDEX
    if not _is_there(index):
        return None
    table = _read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise ModelError(
            f"'{index}' has no weight_map from tensors to files; download the model again."
        )
    for file in dict.fromkeys(table.values()):
        if file in ("", ".", "..") or Path(file).name != file:
            raise ModelError(
                f"'{index}' names '{printable(file)}', which is no name of a file in its folder; "
                "put the file there and write its name alone, or download the model again."
            )
        if not _is_there(folder / file):
            raise ModelError(
                f"'{index}' names '{printable(file)}', which is not there; download the model "
                "again."
            )
    return {tensor: folder / file for tensor, file in table.items()}


def require_listed(files: Iterable[WeightFile], index: Mapping[str, Path]) -> None:
    """Refuse a file that holds other tensors than the index lists for it.

    Raises:
        ModelError: the first tensor that is one too many or too few.
    """
    listed: dict[Path, set[str]] = {}
    for name, path in index.items():
        listed.setdefault(path, set()).add(name)
    for file in files:
        for name in sorted(file.tensors.keys() ^ listed.get(file.path, set())):
            here = "holds" if name in file.tensors else "lacks"
            raise ModelError(
                f"'{file.path}' {here} '{printable(name)}', against what '{INDEX}' says; download "
                "the model again, or write both anew."
            )


def is_own(file: Path) -> bool:
    """Tell whether a file of a folder lies in it, and is no link to one elsewhere.

    Links of a snapshot in a Hugging Face cache lead to the blobs of its repository; these count as
    the folder's own.
    """
    target, home = file.resolve(), file.parent.resolve()
    caches = (above.parent for above in home.parents if above.name == "snapshots")
    own = [home, *((cache / "blobs").resolve() for cache in caches)]
    return any(target.is_relative_to(place) for place in own)


def _is_there(file: Path) -> bool:
    """Tell whether a folder has such an entry, whatever it is."""
    try:
        return os.path.lexists(file)
    except ValueError:  # a null byte
        return False


def folder_config(folder: Path) -> dict[str, Any]:
    """Return the values of a model's ``config.json``.

    Raises:
        ModelError: the file is missing, cannot be read, or is no JSON object; or a value that says
            what kind of model it is has a wrong type.
    """
    file = folder / "config.json"
    with _readable(folder):
        values = _read_object(file)
    text = values.get("text_config")
    for key, where in (("model_type", values), ("text_config.model_type", text)):
        kind = where.get("model_type") if isinstance(where, dict) else None
        if kind is not None and not (isinstance(kind, str) and kind.isprintable()):
            raise ModelError(
                f"'{file}': the model's {key} is {reprlib.repr(kind)}; correct it to a name."
            )
    if text is not None and not isinstance(text, dict):
        raise ModelError(
            f"'{file}': the model's text_config is {reprlib.repr(text)}; correct it to an object."
        )
    return values


def end_tokens(folder: Path, own: int | None) -> list[int]:
    """Return the token ids that end an answer of a folder's model, in ascending order.

    Args:
        folder: folder of the model; ``eos_token_id`` of both its configs counts.
        own: the tokenizer's ``eos_token_id``.

    Raises:
        ModelError: a config cannot be read, or is no JSON object.
    """
    named: list[Any] = [own]
    for file in (folder / "generation_config.json", folder / "config.json"):
        if _is_there(file):
            with _readable(folder):
                told = _read_object(file).get("eos_token_id")
            named += told if isinstance(told, list) else [told]
    return sorted({token for token in named if type(token) is int})


def require_plain_weights(config: Mapping[str, Any], model: str) -> None:
    """Raise ModelError for a ``config.json`` of a quantized model, not to be run in BF16."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):  # vLLM reads both
            if part.get(key):
                raise ModelError(
                    f"'{model}' is quantized already ('{key}' in its config.json); give the BF16 "
                    "model that it was made from."
                )


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A region in which a file of the folder that cannot be read is a ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"'{error.filename or folder}' cannot be read ({error.strerror or error}); give "
            "the folder of a Hugging Face model on this machine."
        ) from None


def folder_spec(folder: Path, values: Mapping[str, Any] | None = None) -> ModelSpec:
    """Describe the model of a folder, by the values of its config where they have been read.

    Raises:
        ModelError: see :func:`folder_config`; or a key that is missing, or has a value that no
            model has.
    """
    file, values = folder / "config.json", folder_config(folder) if values is None else values
    try:
        spec = ModelSpec.of(values)
    except ModelError as error:
        raise ModelError(f"'{file}': {error}") from None
    if spec.missing:
        raise ModelError(
            f"'{file}' has no key '{spec.missing}'; correct it, or download the model again."
        )
    return spec


def _read_object(file: Path) -> dict[str, Any]:
    text = read_text(file)
    try:
        value = parse_json(text, str(file))
    except RecipeError as error:
        raise ModelError(f"{error} Correct the file, or download the model again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"'{file}' holds a {type(value).__name__}, not a JSON object; correct it.")
    return value


def _numeric_order(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")]
