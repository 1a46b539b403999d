"""The folder that is exported: what it holds, and what of it is copied."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from fp8rl.errors import ModelError, UnsupportedError
from fp8rl.models.folder import INDEX, RECIPE_FILE
from fp8rl.weight_files import Watched

_TO_HF = "examples/converters/convert_{}_to_hf.py of NeMo RL"
_LEFT_OUT = ("config.json", INDEX, "pytorch_model.bin.index.json", "state.json", "SHA256SUMS")
"""Other files that are not copied: they describe the source's own files."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of files with weights, which are not copied."""
_Seen = TypeVar("_Seen", bound=Watched)


def require_model(folder: Path) -> None:
    """Refuse what is no folder of a model, and say what it is.

    Raises:
        ModelError: nothing of the kind is there.
        UnsupportedError: a checkpoint that cannot be read without its engine.
    """
    if not folder.is_dir():
        raise ModelError(f"'{folder}' is no folder; give the folder of a Hugging Face model.")
    weights = any(os.path.lexists(folder / name) for name in (INDEX, "model.safetensors"))
    if weights and os.path.lexists(folder / "config.json"):
        return
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"'{folder}' is a LoRA adapter without its base; merge both into one BF16 model first, "
            f"with merge_and_unload of peft or {_TO_HF.format('lora')}."
        )
    for place in (folder, folder / "policy" / "weights", folder / "weights"):
        if _is_megatron(place):
            raise UnsupportedError(
                f"'{place}' is a checkpoint of Megatron, which only Megatron reads; convert it "
                f"first, with {_TO_HF.format('megatron')}, and export the folder that it writes."
            )
        if any(place.glob("*.distcp")) or any(place.glob("*/*.distcp")):
            raise UnsupportedError(
                f"'{place}' is a distributed checkpoint of PyTorch; convert it first, with "
                f"{_TO_HF.format('dcp')}, or train with checkpointing.save_consolidated: true."
            )
    steps = sorted(path for path in folder.glob("step-*") if (path / "config.json").is_file())
    if steps:
        raise ModelError(f"'{folder}' holds checkpoints; give one of them, such as '{steps[-1]}'.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UnsupportedError(
            f"'{folder}' has its weights in files of torch.save; write them as safetensors first, "
            "with save_pretrained of transformers."
        )
    lacking = "config.json" if weights else "model.safetensors"
    raise ModelError(
        f"'{folder}' has no {lacking}; give the folder of a Hugging Face model in BF16."
    )


def _is_megatron(folder: Path) -> bool:
    return (
        (folder / "latest_checkpointed_iteration.txt").is_file()
        or any(folder.glob("iter_*"))
        or any(folder.glob("mp_rank_*"))
        or (folder.name.startswith("iter_") and (folder / "metadata.json").is_file())
    )


def description(folder: Path) -> list[Path]:
    """Files that say what the weights are."""
    files = [folder / "config.json", folder / INDEX]
    return [file for file in files if os.path.lexists(file)]


def files_to_copy(folder: Path) -> list[Path]:
    """Files besides weights and what describes them: the tokenizer, for example."""
    return [
        file
        for file in sorted(folder.iterdir())
        if not file.name.startswith(".")
        and file.name not in (*_LEFT_OUT, RECIPE_FILE)
        and file.suffix not in _WEIGHTS
        and not file.is_dir()
    ]


def seen(kind: type[_Seen], file: Path) -> _Seen:
    """Look at a file of the model, to notice a change from now on."""
    try:
        return kind(file)
    except OSError as error:
        raise ModelError(
            f"'{file}' cannot be read ({error.strerror or error}); put the file there, or download "
            "the model again."
        ) from None
