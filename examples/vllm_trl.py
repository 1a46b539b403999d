"""A model folder for TRL's vLLM in FP8: ``python examples/vllm_trl.py my-model my-model-fp8``.

TRL makes its own ``LLM`` and has no argument for the quantization, so the model's config names it.
The new folder links the checkpoint; use it for ``GRPOConfig(use_vllm=True, vllm_mode="colocate")``
and for ``trl vllm-serve`` (docs/vllm.md, "TRL"). TRL pushes each parameter through
``load_weights``, or through vLLM's weight transfer, where it is quantized on arrival, and then
resets the prefix cache: nothing in TRL has to change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fp8rl import Recipe

# TRL's colocate mode has no argument for the KV cache's dtype either. `trl vllm-serve` has
# --kv_cache_dtype, but TRL sends no KV scales: set or calibrate them after the start.
RECIPE = Recipe.from_dict({"kv_cache": {"dtype": "auto"}})


def make_folder(source: Path, target: Path, recipe: Recipe = RECIPE) -> Path:
    """Link a checkpoint's files into a folder whose config.json asks for fp8rl."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = target / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file.resolve())
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8rl", "recipe": recipe.to_dict()}
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    if len(folders) != 2 or not (folders[0] / "config.json").is_file():
        sys.exit("usage: python examples/vllm_trl.py FOLDER_WITH_A_config.json NEW_FOLDER")
    if folders[1].exists():
        sys.exit(f"{folders[1]} is there already; name a new folder.")
    make_folder(*folders)
