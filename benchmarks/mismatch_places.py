"""What each place adds to the mismatch when only it differs between rollout engine and trainer.

    python benchmarks/mismatch_places.py [--out FILE.json] [--folder FOLDER]

A small Qwen3 is trained on bytes (``mismatch_model.py``). vLLM with fp8rl samples from it, with an
FP8 KV cache; Megatron-Core with fp8rl scores the same tokens. ``mismatch_reference.py`` scores them
too, with the rounding of either engine at each place, and tells what the whole is made of. Runs on
a CPU or on one GPU with the same command. Metrics: ``fp8rl.mismatch``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from facts import versions
from mismatch_model import text, train, windows
from mismatch_reference import Reference, Ways

from fp8rl import Recipe
from fp8rl.mismatch import mismatch_metrics

ENGINES = {
    # vLLM and Megatron's local layers, as they run on a CPU.
    "CPU": (
        Ways(),
        Ways(
            kv="bf16",
            output="once",
            probabilities="local",
            norm_input="bf16",
            norm_weight="once",
            qk_norm_weight="once",
            rope="each",
        ),
    ),
    # vLLM compiled by Inductor, which rounds nothing inside a kernel, with fp8rl's attention,
    # whose queries have 16 bits; Megatron with TransformerEngine's norms, rotation and attention.
    "GPU": (
        Ways(
            probabilities="flash",
            output="once",
            qk_norm_weight="once",
        ),
        Ways(
            kv="bf16",
            output="once",
            probabilities="flash",
            norm_input="bf16",
            norm_weight="once",
            qk_norm_weight="once",
            rope="float32",
            silu="once",
        ),
    ),
}
"""How rollout engine and trainer compute, from their sources; see docs/measurements/places.md."""
ORDER = ("probabilities", "prompts", "norm_input", "norm_weight", "qk_norm_weight", "silu", "rope")
"""In which order places are made equal, after K and V."""
CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FLOORS = {
    "all but K and V differ": {},
    "with a BF16 KV cache": {"kv": "bf16"},
    "with BF16 linears": {"linears": "bf16"},
    "with both in BF16": {"linears": "bf16", "kv": "bf16"},
}
"""What amplifies the differences that are left when the trainer attends over the cache's values."""
OBSERVED = 32
"""Sequences that KV scales are calibrated on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=700, help="training steps of the model")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32, help="bytes of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="bytes sampled after each prompt")
    parser.add_argument("--folder", type=Path, help="keeps model and samples for another run")
    parser.add_argument("--out", type=Path, default=Path("mismatch_places.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sample(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        found = measure(options)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for title, tables in {"": {"engines": found["engines"]}, **found["places"]}.items():
        for name, rows in tables.items():
            if name != "ways":
                sys.stdout.write(f"\n{title} {name}\n\n{table(rows)}\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe, folder = Recipe(), options.folder
    length = options.prompt + options.tokens
    model = folder / "model"
    if not (model / "config.json").is_file():
        size, rows = ("gpu", 64) if device == "cuda" else ("cpu", 8)
        losses = list(
            train(model, size, steps=options.steps, rows=rows, length=length, device=device)
        )
        (folder / "loss.json").write_text(json.dumps(losses[-1]))
    with trainer(model, recipe, device) as score:
        observed = windows(text(held_out=True), OBSERVED, length, 1).to(device)
        scales = score.scales(observed)
        made = rollout_of(options, "as_it_is", scales)
        tokens, first = made["tokens"].long(), options.prompt
        whole = score(tokens, first)
        engines = {
            "vLLM and Megatron": compare(made["logprobs"], whole),
            "over dequantized K and V": compare(
                made["logprobs"], score(tokens, first, kv_scales=scales)
            ),
            "vLLM, sampling and scoring": compare(made["logprobs"], made["rescored"]),
            "Megatron, batches of one and of many": compare(whole, score(tokens, first, rows=1)),
        }
    if device == "cpu":
        engines |= equal_engines(options, recipe, scales)
    reference = Reference(model, recipe, scales, device, options.prompt)
    name = "CPU" if device == "cpu" else "GPU"
    base, other = ENGINES[name]
    if device == "cuda":  # built without TransformerEngine, whose rotation is fused
        other = other.but(rope="each")
    as_rollout, as_trainer = (reference.logprobs(tokens, ways) for ways in (base, other))
    engines |= {
        "vLLM and the reference like vLLM": compare(made["logprobs"], as_rollout),
        "Megatron and the reference like Megatron": compare(whole, as_trainer),
    }
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions(),
        "options": {k: v for k, v in vars(options).items() if k not in ("folder", "out", "child")},
        "loss": json.loads((folder / "loss.json").read_text()),
        "engines": engines,
        "places": {
            name: places(reference, tokens, *ways) | {"ways": [asdict(each) for each in ways]}
            for name, ways in ENGINES.items()
        },
    }


def equal_engines(
    options: argparse.Namespace, recipe: Recipe, scales: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Measure both engines with the options that make their places equal, on a CPU."""
    from megatron_fp8rl.testing.attention import UnroundedAttention

    first, rows = options.prompt, {}
    powers = {name: 2.0 ** math.ceil(math.log2(scale)) for name, scale in scales.items()}
    with trainer(options.folder / "model", recipe, "cpu", UnroundedAttention) as score:
        for name, kv_scales in (("fp32", scales), ("pow2", powers)):
            made = rollout_of(options, f"equal_{name}", kv_scales)
            tokens = made["tokens"].long()
            title = f"places made equal, {name} KV scales"
            rows[title] = compare(made["logprobs"], score(tokens, first))
            rows[f"{title}, over dequantized K and V"] = compare(
                made["logprobs"], score(tokens, first, kv_scales=kv_scales)
            )
    return rows


def rollout_of(
    options: argparse.Namespace, name: str, scales: dict[str, float]
) -> dict[str, torch.Tensor]:
    """Return what :func:`sample` finds in a process of its own, or found in an earlier run."""
    out = options.folder / f"{name}.json"
    if not out.is_file():
        (options.folder / "scales.json").write_text(json.dumps(scales))
        command = [sys.executable, __file__, "--child", name, "--folder", str(options.folder)]
        for option in ("sequences", "prompt", "tokens"):
            command += [f"--{option}", str(getattr(options, option))]
        environment = os.environ | ({} if torch.cuda.is_available() else CPU_ENV)
        subprocess.run(command, check=True, env=environment)
    return {key: torch.tensor(rows) for key, rows in json.loads(out.read_text()).items()}


def places(
    reference: Reference, tokens: torch.Tensor, base: Ways, other: Ways
) -> dict[str, dict[str, Any]]:
    """Measure, between two references, each place alone, all but it, and one after another."""

    logprobs = cache(partial(reference.logprobs, tokens))

    def kl(rollout: Ways, trainer: Ways) -> dict[str, float]:
        return compare(logprobs(rollout), logprobs(trainer))

    alone, but = {}, {}
    for place in differing(base, other):
        changed = getattr(other, place)
        alone[f"{place}: {getattr(base, place)} -> {changed}"] = kl(
            base, base.but(**{place: changed})
        )
        but[place] = kl(base, other.but(**{place: getattr(base, place)}))
    for place, way in (
        ("kv", "dequantized"),
        ("prompts", "fp8" if base.prompts == "16bit" else "16bit"),
        ("probabilities", "float32" if base.probabilities == "flash" else "flash"),
        ("rope", "float32"),
        ("silu", "once"),
        ("accumulation", "blocks"),
        ("logits", "float32"),
        ("linears", "bf16"),
        ("kv_scales", "pow2"),
    ):
        if way not in (getattr(base, place), getattr(other, place)):
            changed = base.but(**{place: way})
            alone[f"{place}: {getattr(base, place)} -> {way}"] = kl(base, changed)
    pow2 = base.but(kv_scales="pow2")
    alone["kv: codes -> bf16, scales as powers of two"] = kl(pow2, pow2.but(kv="bf16"))
    alone["kv: codes -> dequantized, scales as powers of two"] = kl(
        pow2, pow2.but(kv="dequantized")
    )
    now = other
    steps = {"as they are": kl(base, other)}
    for scales in ("fp32", "pow2"):
        base = base.but(kv_scales=scales)
        now = now.but(kv="dequantized", kv_scales=scales)
        steps[f"K and V dequantized in the trainer, {scales} scales"] = kl(base, now)
    now = now.but(output=base.output)
    for place in ORDER:
        if place in differing(base, now):
            now = now.but(**{place: getattr(base, place)})
            steps[place] = kl(base, now)
    steps["and another order of sums in GEMMs"] = kl(base, now.but(accumulation="blocks"))
    floors = {}
    for name, floor in FLOORS.items():
        floors[name] = kl(
            base.but(**floor), other.but(**({"kv": "dequantized", "kv_scales": "pow2"} | floor))
        )
    return {"alone": alone, "all but": but, "one after another": steps, "floors": floors}


def differing(base: Ways, other: Ways) -> list[str]:
    """Return the places where two engines differ."""
    return [f.name for f in fields(Ways) if getattr(base, f.name) != getattr(other, f.name)]


def compare(rollout: torch.Tensor, trainer: torch.Tensor) -> dict[str, float]:
    """Return KL (k3), probability error, and the share of logprobs that are equal to the bit."""
    metrics = mismatch_metrics(rollout, trainer, torch.ones_like(rollout))
    equal = (rollout == trainer).double().mean().item()
    return {
        "kl_k3": metrics.kl_k3,
        "token_mult_prob_error": metrics.token_mult_prob_error,
        "equal": equal,
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return rows as a Markdown table."""
    lines = [
        "| place | KL (k3) | probability error | equal to the bit |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['kl_k3']:.1e} | {row['token_mult_prob_error']:.4f} "
            f"| {row['equal']:.1%} |"
        )
    return "\n".join(lines)


def sample(options: argparse.Namespace) -> None:
    """Sample with vLLM and score the samples with it; write both to the folder."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from vllm_fp8rl import engine_args
    from vllm_fp8rl.calibration import send_kv_scales

    folder = options.folder
    more: dict[str, Any] = {}
    if options.child.startswith("equal"):
        from vllm_fp8rl.testing.trainer_numerics import engine_options

        more = engine_options()
    llm = LLM(
        str(folder / "model"),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options.prompt + options.tokens + 1,
        max_num_seqs=options.sequences,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),
        seed=0,
        **more,
        **engine_args(Recipe()),
    )
    send_kv_scales(llm, json.loads((folder / "scales.json").read_text()))
    prompts = windows(text(held_out=True), options.sequences, options.prompt, 2).tolist()
    sampling = SamplingParams(
        max_tokens=options.tokens, ignore_eos=True, detokenize=False, logprobs=0, seed=3
    )
    inputs: Any = [{"prompt_token_ids": p} for p in prompts]
    outputs = [o.outputs[0] for o in llm.generate(inputs, sampling, use_tqdm=False)]
    tokens = [p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
    logprobs = [
        [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)]
        for o in outputs
    ]
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": t} for t in tokens], scoring, use_tqdm=False)
    rescored = [
        [
            entry[token].logprob
            for entry, token in zip(
                o.prompt_logprobs[options.prompt :], row[options.prompt :], strict=True
            )
        ]
        for o, row in zip(scored, tokens, strict=True)
    ]
    (folder / f"{options.child}.json").write_text(
        json.dumps({"tokens": tokens, "logprobs": logprobs, "rescored": rescored})
    )


class Trainer:
    """Logprobs of a Megatron-Core model with FP8 linears."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self.model, self.device = model, device

    @torch.no_grad()
    def __call__(
        self,
        tokens: torch.Tensor,
        prompt: int,
        *,
        rows: int = 32,
        kv_scales: dict[str, float] | None = None,
    ) -> torch.Tensor:
        """Return logprobs of the tokens after the prompt, float32 on the CPU.

        Args:
            tokens: int64 ``[B, T]``.
            prompt: number of tokens that are not scored.
            rows: sequences in one forward.
            kv_scales: K and V are quantized and dequantized with these scales before attention.
        """
        hooks = []
        if kv_scales is not None:
            for number, layer in enumerate(self.model.decoder.layers):
                hook = _through_the_cache(number, kv_scales)
                core = layer.self_attention.core_attention
                hooks.append(core.register_forward_pre_hook(hook))
        parts = []
        for batch in tokens.to(self.device).split(rows):
            logits = self._logits(batch)[:, prompt - 1 : -1].float()
            chosen = batch[:, prompt:, None]
            parts.append(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).cpu())
        for hook in hooks:
            hook.remove()
        return torch.cat(parts)

    @torch.no_grad()
    def scales(self, tokens: torch.Tensor) -> dict[str, float]:
        """Return KV scales calibrated on tokens ``[B, T]``."""
        from megatron_fp8rl.observers import QKVObserver

        observer = QKVObserver([self.model])
        self._logits(tokens)
        found = observer.scales(margin=Recipe().kv_cache.margin)
        observer.close()
        return {name: float(scale) for name, scale in found.items()}

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.model(tokens, positions, None)


def _through_the_cache(layer: int, scales: dict[str, float]) -> Any:
    from fp8rl.kv_scales import scale_name
    from fp8rl.numerics import E4M3_MAX, FP8_DTYPE

    def round_trip(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
        return (codes.float() * scale).to(x.dtype)

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *others = args
        key = round_trip(key, scales[scale_name(layer, "k")])
        value = round_trip(value, scales[scale_name(layer, "v")])
        return (query, key, value, *others)

    return hook


@contextmanager
def trainer(
    path: Path, recipe: Recipe, device: str, core_attention: type | None = None
) -> Iterator[Trainer]:
    """Build Megatron-Core with the weights of a checkpoint folder, converted by the recipe."""
    from safetensors.torch import load_file

    from megatron_fp8rl import convert
    from megatron_fp8rl.export import load_hf

    config = SimpleNamespace(**json.loads((path / "config.json").read_text()))
    tensors = load_file(path / "model.safetensors")
    if device == "cuda":
        from megatron_common import build, single_process

        with single_process():
            model = build(config)
            load_hf([model], tensors)
            convert(model, recipe)
            yield Trainer(model.eval(), device)
        return
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo
    from megatron_fp8rl.testing.models import build_gpt

    with CpuShim().active():
        init_gloo()
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(1)
        model = build_gpt(config, core_attention=core_attention)
        load_hf([model], tensors)
        convert(model, recipe)
        yield Trainer(model.eval(), device)
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
