"""The first decoder layers of a model as a model of its own, for looks at its modules."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from fp8rl.errors import ModelError
from fp8rl.kv_scales import parse_scale_name
from fp8rl.models.folder import folder_config, folder_tensors
from fp8rl.weight_files import WeightFile

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def write_first_layers(model: Path, layers: int, out: Path) -> None:
    """Write a model of the first ``layers`` layers, with the tokenizer, into the folder ``out``.

    KV scales of the checkpoint stay behind: they are an engine's, and no tensors of the model.

    Args:
        model: folder of a dense Hugging Face model with safetensors.
        layers: number of layers; a model of fewer keeps all.
        out: an empty folder.

    Raises:
        ModelError: the model cannot be read, has no safetensors, or no number of layers.
    """
    config, files = folder_config(model), folder_tensors(model)
    if files is None or not isinstance(config.get("num_hidden_layers"), int):
        raise ModelError(
            f"'{model}' has no safetensors, or no num_hidden_layers in its config.json; give the "
            "folder of a dense model of text."
        )
    layers = config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    tensors: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(files.values()):
        names = [name for name, place in files.items() if place == file and _within(name, layers)]
        if names:
            tensors.update(WeightFile(file).read(names))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for other in model.iterdir():
        described = other.is_file() and not other.name.endswith(_WEIGHTS)
        if described and not (out / other.name).exists():
            shutil.copyfile(other, out / other.name)


def _within(name: str, layers: int) -> bool:
    if parse_scale_name(name) is not None:
        return False
    found = _LAYER.match(name)
    return found is None or int(found.group(1)) < layers
