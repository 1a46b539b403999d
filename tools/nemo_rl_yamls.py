"""Write the table of NeMo RL's FP8 configs in docs/versions.md: what `fp8rl doctor` says of each.

    NEMO_RL_SRC=/path/to/checkout python tools/nemo_rl_yamls.py

tests/contract/test_doctor.py compares the page with the same checkout.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fp8rl.plugins.adapters import ConfigRequest, Diagnosis
from nemo_rl_ext.doctor.config_file import load_config
from nemo_rl_ext.doctor.examination import examine

PAGE = Path(__file__).resolve().parents[1] / "docs" / "versions.md"
BEGIN = "<!-- written by tools/nemo_rl_yamls.py: begin -->"
END = "<!-- written by tools/nemo_rl_yamls.py: end -->"
HEAD = ("config", "model", "rollout", "training", "with fp8rl")
_DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_MOE = ("num_experts", "moe_intermediate_size")


def _model(kind: str, dense: tuple[int, ...], heads: tuple[int, ...], *moe: int) -> dict[str, Any]:
    sizes = zip((*_DENSE, *_HEADS, *_MOE), (*dense, *heads, *moe), strict=False)
    # A model whose layers all have experts has no dense width, here 0.
    given = {key: size for key, size in sizes if size}
    return {"model_type": kind, "tie_word_embeddings": False, **given}


def _wrapped(text: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    vision = {**_VISION, "out_hidden_size": text["hidden_size"]}
    return {"vision_config": vision, "text_config": {**text, **more}}


_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _model("llama", (4096, 14336, 32, 128256), (32, 8, 128)),
    "Llama-3.3-70B": _model("llama", (8192, 28672, 80, 128256), (64, 8, 128)),
    "Qwen3-8B": _model("qwen3", (4096, 12288, 36, 151936), (32, 8, 128)),
    "Qwen3-32B": _model("qwen3", (5120, 25600, 64, 151936), (64, 8, 128)),
    "Qwen3-30B-A3B": _model("qwen3_moe", (2048, 6144, 48, 151936), (32, 4, 128), 128, 768),
    "Qwen3-235B-A22B": _model("qwen3_moe", (4096, 12288, 94, 151936), (64, 4, 128), 128, 1536),
    "Qwen3.5-9B": _wrapped(
        _model("qwen3_5_text", (4096, 12288, 32, 248320), (16, 4, 256)), _DELTA_NET
    ),
    "Qwen3.5-35B-A3B": _wrapped(
        _model("qwen3_5_moe_text", (2048, 0, 40, 248320), (16, 2, 256), 256, 512),
        {**_DELTA_NET, "shared_expert_intermediate_size": 512},
    ),
    "Moonlight": {
        **_model("deepseek_v3", (2048, 11264, 27, 163840), (16, 16, 64), 64, 1408),
        **_LATENT,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek": {
        **_model("deepseek_v3", (7168, 18432, 61, 129280), (128, 128, 64), 256, 2048),
        **_LATENT,
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
    "MiniMax-M2": {
        **_model("minimax_m2", (3072, 1536, 62, 200064), (48, 8, 128)),
        "num_local_experts": 256,
    },
}
"""Parts of the models' ``config.json``, by a part of the name in NeMo RL's configs. No machine that
runs this needs to hold the models."""


def fp8_configs(source: Path) -> list[Path]:
    """The configs below ``examples/`` that ask for FP8 by NeMo RL's own keys."""

    @cache
    def read(file: Path) -> dict[str, Any]:
        data = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        return data if isinstance(data, dict) else {}

    def value(file: Path, *path: str) -> Any:
        found: Any = read(file)
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        parents = read(file).get("defaults") or []
        for parent in reversed([parents] if isinstance(parents, str) else parents):
            if found is None:
                found = value((file.parent / parent).resolve(), *path)
        return found

    vllm = ("policy", "generation", "vllm_cfg")
    return [
        file
        for file in sorted((source / "examples").rglob("*.yaml"))
        if value(file, *vllm, "precision") == "fp8"
        or value(file, *vllm, "kv_cache_dtype") == "fp8"
        or value(file, "policy", "megatron_cfg", "fp8_cfg", "enabled") is True
    ]


def diagnoses(source: Path) -> Iterator[tuple[str, str, Diagnosis]]:
    """Yield path, model and diagnosis of each FP8 config of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        for file in fp8_configs(source):
            name = load_config(file)["policy"]["model_name"]
            model = next(model for model in MODELS if model in name)
            Path(folder, "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
            found = examine(ConfigRequest(file, source, Path(folder)))
            path = str(file.relative_to(source / "examples" / "configs"))
            yield path.removeprefix("recipes/"), name, found


def table(source: Path) -> str:
    """The part of the page between the two marks."""
    rows = [HEAD, ("---",) * len(HEAD)]
    reasons: list[str] = []
    for path, name, found in diagnoses(source):
        outcome = "resolves"
        if found.problems:
            reason = found.problems[0].replace(f"'{name}'", "this model")
            reasons += [] if reason in reasons else [reason]
            outcome = f"refused ({reasons.index(reason) + 1})"
        rows.append(
            (
                f"`{path}`",
                "a local folder" if " " in name else name.rpartition("/")[2],
                found.facts.get("rollout", "").partition(";")[0].replace(" linear layers", ""),
                found.facts.get("training", "").partition(";")[0].replace(" linear layers", ""),
                outcome,
            )
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1))])


def page(text: str, source: Path) -> str:
    """The page with the table of a checkout in it."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(source)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(
        page(PAGE.read_text(encoding="utf-8"), Path(os.environ["NEMO_RL_SRC"])), encoding="utf-8"
    )
    sys.stdout.write(f"{PAGE} was written.\n")
