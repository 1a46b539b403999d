"""Which places does FP8 cost a pretrained policy most, and what does a pin to BF16 buy back?

    python benchmarks/pins.py MODEL [--texts 24] [--tokens 96] [--json FILE] [--answers FILE]
        [--scan 3 | --recipe 'NAME={"pins": {"last": 1}}' ..]

``MODEL``, the folder of a dense model, answers prompts of real text in float32, then reads the
answers with linear layers, K and V rounded as recipes say (no cache of 8 bits where a recipe names
none): KL(plain || rounded) over the whole vocabulary.
``--scan 3`` has one kind in three layers in FP8, and other prompts. CPU or GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fp8rl import Recipe, numerics
from fp8rl.kv_scales import scale_name, scales_from_amax
from fp8rl.models.folder import folder_module_names
from fp8rl.models.pins import ALWAYS_BF16, PinPolicy
from fp8rl_bench.answers import PROMPTS, chat_ids
from fp8rl_bench.facts import versions

KINDS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SIDES = ("weights", "activations")
FIGURES = ("kl", "top1", "sampled_logprob", "sampled_change")
"""KL(plain || rounded), equal first choices, change of sampled log-probabilities and its size."""


def recipes(layers: int, step: int) -> dict[str, dict[str, Any]]:
    """Return the rows' recipes, or those of a scan in steps; ``sides`` are the rounded operands."""
    made: dict[str, dict[str, Any]] = {"FP8": {}}
    for kind in KINDS:
        others = [each for each in KINDS if each != kind]
        for first in range(0, layers, step or layers):
            rest = [n for n in range(layers) if step and not first <= n < first + step]
            made[f"{kind} from {first} alone"] = {"pins": {"kinds": others, "layers": rest}}
    if step:
        return made
    pins: list[dict[str, Any]] = [{"kinds": [kind]} for kind in KINDS]
    pins += [{end: n} for end in ("first", "last") for n in (1, 2, 4) if n < layers]
    pins += [{"kinds": ["qkv_proj"], "last": 1}]
    made |= {f"{side} alone": {"sides": [side]} for side in SIDES}
    made |= {f"{side}' scales powers of two": {side: {"scale_format": "pow2"}} for side in SIDES}
    made |= {f"pins {json.dumps(pin)}": {"pins": pin} for pin in pins}
    for dtype in ("fp8_e4m3", "int8_per_token_head"):
        made[dtype] = {"kv_cache": {"dtype": dtype}}
        for pin in ({"first": layers}, pins[0], pins[3], pins[-1]):  # first: the cache alone
            made[f"{dtype}, pins {json.dumps(pin)}"] = made[dtype] | {"pins": pin}
    return made


class Rounded:
    """A model whose linear layers, K and V are rounded as a recipe says; at first none is."""

    def __init__(self, folder: Path, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.model, self.names = model, folder_module_names(folder)
        self.linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        self.plain = {name: linear.weight.data for name, linear in self.linears.items()}
        self.amax = torch.full((model.config.num_hidden_layers, 3), 1e-6, device=device)
        self.rounds: set[torch.nn.Module] = set()
        self.last: tuple[Any, Any] = None, None
        self.recipe: Recipe | None = None
        for linear in self.linears.values():
            linear.register_forward_pre_hook(self._round_input)
        AttentionInterface.register("rounded", self._attend)

    def use(self, recipe: dict[str, Any]) -> float:
        """Round by a recipe from now on; return the share of linear FLOPs that stay in BF16."""
        whole = {"kv_cache": {"dtype": "auto"}} | recipe
        sides = whole.pop("sides", SIDES)
        self.recipe = Recipe.from_dict(whole)
        report = PinPolicy(self.recipe.pins, self.names).report()
        rows = [row for row in report if row.kind not in ALWAYS_BF16]
        if strange := [row.name for row in rows if row.name not in self.linears]:
            sys.exit(f"{strange[0]} is no linear layer in transformers; give a dense model.")
        fp8 = {row.name for row in rows if row.precision == "fp8"}
        form = self.recipe.weights.scale_format
        for name, linear in self.linears.items():
            linear.weight.data = self.plain[name]
            if name in fp8 and "weights" in sides:
                codes = numerics.quantize_block(self.plain[name], scale_format=form)
                linear.weight.data = numerics.dequantize_block(*codes)
        self.rounds = {self.linears[name] for name in fp8 if "activations" in sides}
        size = {row.name: self.plain[row.name].numel() for row in rows}
        return 1 - sum(size[name] for name in fp8) / sum(size.values())

    def _round_input(self, linear: torch.nn.Module, given: tuple[torch.Tensor]) -> Any:
        if linear not in self.rounds:
            return None
        if self.last[0] is not given[0]:  # q, k and v read one tensor, and so do gate and up
            codes = numerics.quantize_group(given[0], 128, self.recipe.activations.scale_format)
            self.last = given[0], numerics.dequantize_group(*codes)
        return (self.last[1],)

    def _attend(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        if self.recipe is None:
            numerics.amax_into(self.amax[module.layer_idx], (q, k, v))
        elif self.recipe.kv_cache.dtype == "int8_per_token_head":
            k, v = numerics.fake_quantize_int8_kv(k, v)
        elif self.recipe.kv_cache.dtype == "fp8_e4m3":
            found = scales_from_amax(self.amax, self.recipe.kv_cache.margin)
            scales = torch.cat([found[scale_name(module.layer_idx, role)] for role in ("k", "v")])
            clipped = torch.zeros(2, dtype=torch.int64, device=k.device)
            k, v = numerics.fake_quantize_kv(k, v, scales.to(k.device), clipped)
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    def logprobs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Return log-probabilities ``[tokens, vocabulary]`` of an answer."""
        ids = torch.tensor([prompt + answer], device=self.model.device)
        logits = self.model(ids[:, :-1], use_cache=False, logits_to_keep=len(answer)).logits
        return logits[0].log_softmax(-1)


def distances(answer: list[int], plain: Any, other: Any) -> torch.Tensor:
    """Return the means over an answer's tokens of :data:`FIGURES`."""
    sampled = torch.tensor(answer, device=plain.device)[:, None]
    moved = (other - plain).gather(1, sampled)[:, 0]
    kl = (plain.exp() * (plain - other)).sum(-1)
    same = plain.argmax(-1) == other.argmax(-1)
    return torch.stack((kl, same.float(), moved, moved.abs())).mean(1).double()


def answers(model: Rounded, options: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Read prompts and answers, or sample and write them."""
    if options.answers and options.answers.is_file():
        return json.loads(options.answers.read_text(encoding="utf-8"))
    tokenizer, texts = AutoTokenizer.from_pretrained(options.model), []
    asked = [PROMPTS[5 * n % len(PROMPTS)] for n in range(len(PROMPTS))]  # of every task
    for task in asked[:: -1 if options.scan else 1][: options.texts]:
        prompt = chat_ids(tokenizer, task)
        ids = torch.tensor([prompt], device=model.model.device)
        made = model.model.generate(
            ids, max_new_tokens=options.tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        texts.append((prompt, made[0, len(prompt) :].tolist()))
    if options.answers:
        options.answers.write_text(json.dumps(texts), encoding="utf-8")
    return texts


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=int, default=24, help="2 to 128")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--answers", type=Path, help="read if it exists, else written")
    parser.add_argument("--scan", type=int, default=0)
    parser.add_argument("--recipe", action="append", help="these rows, not the table's")
    parser.add_argument("--json", type=Path, default=Path("pins.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Rounded(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    texts = answers(model, options)
    model.model.set_attn_implementation("rounded")
    plain = [model.logprobs(*text) for text in texts]
    table = recipes(len(model.amax), options.scan)
    if options.recipe:
        pairs = (text.partition("=") for text in options.recipe)
        table = {"FP8": {}} | {name: json.loads(recipe) for name, _, recipe in pairs}
    result: dict[str, Any] = {"model": options.model.name, "device": str(model.model.device)}
    result |= {"versions": versions(), "texts": len(texts), "tokens": sum(map(len, plain))}
    result["rows"], base = {}, None
    for name, recipe in table.items():
        row = {"recipe": recipe, "bf16_flops": model.use(recipe)}
        each = [distances(t[1], p, model.logprobs(*t)) for t, p in zip(texts, plain, strict=True)]
        kl = torch.stack(each)[:, 0]
        base = kl if base is None else base
        row |= zip(FIGURES, torch.stack(each).mean(0).tolist(), strict=True)
        for key, values in (("kl", kl), ("saved", (base - kl) / base.mean())):  # texts are pairs
            row |= {key: values.mean().item(), f"{key}_se": (values.std() / len(kl) ** 0.5).item()}
        result["rows"][name] = row
        sys.stdout.write(f"{name}: {json.dumps(row)}\n")
        sys.stdout.flush()
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
