"""Megatron's trainer: a layer in BF16 and FP8, and log-probabilities of the rollouts' answers.

Importing this module does not import Megatron; :func:`measure` runs it in this process.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl_bench.answers import compared
from fp8rl_bench.variants import KV_SCALE, recipe_of

if TYPE_CHECKING:
    from fp8rl_bench.worker import Row

LAYERS = ("BF16", "fp8rl", "fp8rl, FP8 K and V", "fp8rl, exact")
TOKENS, SEQUENCE, ROUNDS = 8192, 4096, 25
"""On a GPU; a CPU has a 32nd of the tokens and a few rounds."""


def prepare() -> None:
    """Import what takes long, before this process has its turn on the GPU."""
    import megatron_fp8rl.export
    import megatron_fp8rl.kv.cache
    import megatron_fp8rl.testing.exact_replay  # noqa: F401


def measure(job: dict[str, Any], row: Row) -> None:
    """Time a layer, and score what the rollouts sampled.

    Args:
        job: ``model`` (a folder), ``config`` (its config.json), ``random``, ``device``, and
            ``folder`` with the rollouts' answers.
    """
    from megatron_fp8rl.testing.exact_replay import alone
    from megatron_fp8rl.testing.local_spec import completed_local_spec

    on_gpu = job["device"] != "cpu"
    with alone(job["device"]), completed_local_spec() if on_gpu else nullcontext():
        _time(job, row)
        if not job["random"]:
            _score(job, row)


def _time(job: dict[str, Any], row: Row) -> None:
    import torch

    from fp8rl import PluginManager, Recipe
    from fp8rl.kv_scales import scale_names
    from fp8rl_bench.layers import LayerPass, LinearsPass, build, interleaved, linears, shape_of
    from megatron_fp8rl import convert
    from megatron_fp8rl.kv.cache import KVCacheInTraining

    part = 1 if job["device"] != "cpu" else 32
    tokens, sequence = TOKENS // part, SEQUENCE // part
    rounds, calls = (ROUNDS, 3) if part == 1 else (3, 1)
    row.found |= {"tokens": tokens, "sequence": sequence}
    kinds = job["config"].get("layer_types")
    first = {"num_hidden_layers": 1, "vocab_size": 1024, "tie_word_embeddings": False}
    first |= {"layer_types": kinds[:1]} if kinds else {}
    shape = shape_of(job["config"], **first)

    def made(label: str) -> Any:
        model = build(shape, device=job["device"])
        if label != "BF16":
            recipe = Recipe(exact="exact" in label)
            convert(model, recipe, plugins=PluginManager(discover=False))
        if label.endswith(("K and V", "exact")):
            KVCacheInTraining(model).set(dict.fromkeys(scale_names(1), KV_SCALE))
        return model

    torch.manual_seed(0)
    with row.part("linears", "times the linear layers of a layer"):
        bf16 = LinearsPass(linears(made("BF16")), tokens)
        passes = {"BF16": bf16, "fp8rl": LinearsPass(linears(made("fp8rl")), tokens, like=bf16)}
        row.found["linears"] = interleaved(passes, rounds, calls)
    layers: dict[str, LayerPass] = {}
    for label in LAYERS:
        with row.part(label, f"builds a layer: {label}"):
            layer = LayerPass(made(label), tokens, sequence)
            layer()
            layers[label] = layer
    with row.part("layer", "times a layer, forward and backward"):
        row.found["layer"] = interleaved(layers, rounds, calls)
    with row.part("forward", "times a layer, forward alone"):
        forwards = {label: layer.forward for label, layer in layers.items()}
        row.found["forward"] = interleaved(forwards, rounds, calls)


def _score(job: dict[str, Any], row: Row) -> None:
    """Compare the rollouts with a trainer in BF16, and those of fp8rl with one of their recipe."""
    from megatron_fp8rl import convert
    from megatron_fp8rl.kv.cache import KVCacheInTraining

    folder = Path(job["folder"])
    given = {
        file.name.partition(".")[0]: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.glob("*.answers.json"))
    }
    row.found |= {"bf16_trainer": {}, "trainer": {}}
    model: Any = None
    with row.part("load", "loads the model"):
        model = _load(job)
    if model is None:
        return
    for variant, sampled in given.items():
        with row.part(variant, f"scores the answers of {variant}, in BF16"):
            found = compared(sampled["logprobs"], logprobs(model, sampled))
            row.found["bf16_trainer"][variant] = found
            if not variant.startswith("fp8rl"):
                row.found["trainer"][variant] = found
    ours = sorted((v for v in given if v.startswith("fp8rl")), key=lambda v: "exact" in v)
    converted = False
    for variant in ours:
        recipe = recipe_of(variant)
        with row.part(variant, f"scores the answers of {variant}, by its recipe"):
            if recipe.exact:
                model = None  # it cannot be converted twice, and two take much memory
                model = _load(job)
            if recipe.exact or not converted:
                convert(model, recipe)
                converted = True
            cache = None
            if recipe.kv_cache.dtype != "auto":
                cache = KVCacheInTraining(model, recipe.kv_cache.dtype)
                if cache.has_scales:
                    cache.set(given[variant]["scales"])
            found = compared(given[variant]["logprobs"], logprobs(model, given[variant]))
            row.found["trainer"][variant] = found
            if cache is not None:
                cache.close()


def _load(job: dict[str, Any]) -> Any:
    """Build the whole model with the weights of its folder."""
    from fp8rl.models.folder import read_tensors
    from fp8rl_bench.layers import build, shape_of
    from megatron_fp8rl.export import load_hf

    model = build(shape_of(job["config"]), device=job["device"])
    load_hf([model], read_tensors(Path(job["model"])), allow_cast=True)
    return model.eval()


def logprobs(model: Any, sampled: dict[str, Any]) -> list[Any]:
    """Return the trainer's log-probabilities of sampled answers, one sequence at a time."""
    import torch

    from fp8rl.kernels import implementation

    device = next(model.parameters()).device
    found = []
    with torch.no_grad():
        for prompt, answer in zip(sampled["prompts"], sampled["answers"], strict=True):
            ids = torch.tensor([prompt + answer], device=device)
            places = torch.arange(ids.shape[1], device=device)[None]
            logits = model(ids, places, None)[0, len(prompt) - 1 : -1].contiguous()
            function = implementation(logits, "logprobs").token_logprobs
            found.append(function(logits, ids[0, len(prompt) :])[0].cpu())
    return found
