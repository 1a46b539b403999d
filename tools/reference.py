#!/usr/bin/env python
"""Write docs/reference.md from the code: recipe keys, metrics, commands, environment variables.

    python tools/reference.py

``tests/test_docs.py`` compares the file with what the code gives.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from typer.main import get_command

from fp8rl import PluginManager, Recipe
from fp8rl.cli import build_app
from fp8rl.mismatch import MismatchMetrics
from fp8rl.models.families import FAMILIES, Family
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "reference.md"

CORRECTION = {
    "is_weight_mean": "mean weight of the kept units (tokens, or sequences)",
    "is_weight_min": "smallest",
    "is_weight_max": "largest",
    "is_weight_ess": "effective sample size of the weights, as a share of the kept units",
    "is_low_share": "share of the kept units with a ratio below `low`",
    "is_high_share": "share of the kept units with a ratio above `high`",
    "rejected_share": "share of the tokens that were rejected, for any reason",
    "rejected_low_share": "by `rejection.low`",
    "rejected_high_share": "by `rejection.high`",
    "rejected_veto_share": "by `token_veto`",
    "rejected_sequence_share": "share of the sequences left without a token",
    "all_rejected": "1 if no token of the batch is left",
}
LOSS = {
    "loss": "the loss that is minimised",
    "policy_loss": "the loss without the KL term",
    "loss_tokens": "number of tokens in the loss",
    "loss_sequences": "number of sequences in the loss",
    "ratio_min": "smallest ratio of the current to the old policy (GSPO: of sequences)",
    "ratio_max": "largest",
    "ratio_mean": "mean",
    "clip_low_share": "share of the tokens clipped at the lower bound",
    "clip_high_share": "share of the tokens clipped at the upper bound",
    "dual_clip_share": "share of the tokens clipped by the dual clip",
    "approx_kl": "k3 estimate of KL(old, current)",
    "entropy_proxy": "mean of the negative logprob under the current policy",
    "advantage_mean": "mean advantage",
    "kl_reference": "k3 estimate of KL(current, reference), with reference logprobs",
}
REPLAY = {
    "replayed_route_share": "share of the routes that came from the rollout; a route is the set of "
    "experts of one token in one layer",
    "replay_changed_route_share": "share of the replayed routes where the trainer's own top-k is "
    "another set of experts",
    "replay_changed_expert_share": "share of the replayed experts that are not in the trainer's "
    "own top-k",
}
KV_CACHE = {
    "k_clipped_share": "share of the elements of K beyond 448 times their scale",
    "v_clipped_share": "share of the elements of V beyond 448 times their scale",
}
DRIVER = {
    "guard_level": "level of the mismatch guard: 0 normal, 1 tight, 2 skip",
    "guard_rejected_share": "share of the tokens that the tight level rejected",
    "equal_logprobs": "with `exact`, share of the sampled tokens whose log-probabilities are the "
    "trainer's to the bit; below 1 in a step on policy is an error in the log",
    "step_skipped": "1 if the step was left out, by the guard or because rejection left nothing",
}
ENVIRONMENT = {
    "FP8RL_RECIPE": "recipe of an engine that is given none: a path, or JSON",
    "FP8RL_BLOCK_PLUGINS": "names of fp8rl plugins that are not loaded, with commas",
    "FP8RL_DEBUG": "1: the `fp8rl` command shows tracebacks, as `--debug` does",
    "FP8RL_AUTOLOAD": "0: `import torch` does not load fp8rl into NeMo RL's driver",
    "FP8RL_FUSED_LOGPROBS": "0: NeMo RL's Megatron worker leaves log-probabilities to upstream's "
    "class; 1: with `training: true` on a GPU it does not start where it would have to",
    "FP8RL_KEEP_CODES": "0: NeMo RL's Megatron worker keeps no weight codes over micro-batches",
    "FP8RL_CPU_WEIGHT_CACHE": "0: vLLM on a CPU keeps no float32 copy of each FP8 weight",
    "FP8RL_TORCH_INDEX": "package index from which `make install` takes PyTorch",
}


def reference() -> str:
    """The whole text of docs/reference.md."""
    return "\n".join(
        [
            "# Reference",
            "",
            "This file is made from the code: run `python tools/reference.py` after a change.",
            "",
            "## Recipe keys",
            "",
            "Every engine reads the same recipe; NeMo RL's guard has",
            "[keys of its own](nemo_rl.md#guard).",
            "",
            *_table(("key", "type", "default", "meaning"), _keys(Recipe)),
            "",
            "## Model families",
            "",
            "The table in `plugins/fp8rl/models/families.py`;",
            "[extending.md](extending.md#add-a-model) says how to add an entry. A model of another",
            "`model_type` is refused where rollouts are to run in FP8. Always in BF16 are",
            "[these modules](recipe.md#pins); `pins.fp8` puts what is so by default into FP8. A KV",
            "cache holds K and V in FP8, INT8 or BF16 where nothing else is said.",
            "",
            *_table(
                (
                    *("family", "`model_type`", "in BF16 by default", "KV cache"),
                    *("a refit also makes anew", "not served yet"),
                ),
                map(_family, FAMILIES),
            ),
            "",
            "## Loss keys",
            "",
            "Of `nemo_rl_ext.GRPOConfig`. [When to use which mode](trainer.md#which-policy-term).",
            "",
            *_table(("key", "type", "default", "meaning"), _keys(GRPOConfig)),
            "",
            "## Metrics",
            "",
            "In NeMo RL's loggers they are `train/fp8rl/NAME`, in all of its loops.",
            "",
            "### Mismatch of rollout and trainer (`fp8rl.mismatch`)",
            "",
            "`log_ratio` is trainer minus rollout logprob of a token, in nats; ratio is its exp.",
            "",
            *_metrics(_attribute_docs(MismatchMetrics)),
            "",
            "### Importance sampling and rejection (`nemo_rl_ext.correct`)",
            "",
            *_metrics(CORRECTION),
            "",
            "### Mismatch guard of NeMo RL's driver",
            "",
            *_metrics(DRIVER),
            "",
            "### Router replay (`megatron_fp8rl.router_replay`)",
            "",
            "In NeMo RL's loggers `train/moe/fp8rl/NAME`.",
            "",
            *_metrics(REPLAY),
            "",
            "### Loss (`nemo_rl_ext.GRPOLoss`)",
            "",
            *_metrics(LOSS),
            "",
            "### FP8 KV cache in training (`megatron_fp8rl.kv.cache`)",
            "",
            "In the demo they are in `loss_metrics`.",
            "",
            *_metrics(KV_CACHE),
            "",
            "## Commands",
            "",
            "`fp8rl COMMAND --help` has the options.",
            "",
            *_table(("command", "what it does"), _commands()),
            "",
            "## Environment variables",
            "",
            *_table(("variable", "meaning"), [(f"`{k}`", v) for k, v in ENVIRONMENT.items()]),
            "",
        ]
    )


def emitted_metrics() -> set[str]:
    """Names of the metrics that a correction and a loss give, from a small batch."""
    logprobs = torch.full((2, 3), -1.0)
    ones = torch.ones(2, 3)
    found: set[str] = set()
    for dual_clip in (None, 3.0):
        loss = GRPOLoss(GRPOConfig(dual_clip=dual_clip), Recipe().importance_sampling)
        _, metrics = loss(
            logprobs, logprobs, logprobs, torch.ones(2), ones, reference_logprobs=logprobs
        )
        found |= set(metrics)
    return found


def _keys(model: type[BaseModel]) -> list[tuple[str, ...]]:
    schema = model.model_json_schema()
    return list(_rows(model, schema, schema.get("$defs", {}), ""))


def _rows(
    model: type[BaseModel], schema: dict[str, Any], definitions: dict[str, Any], prefix: str
) -> Iterable[tuple[str, ...]]:
    docs = _attribute_docs(model)
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner = _section(field.annotation)
        default = field.get_default(call_default_factory=True)
        meaning = _plain(docs[name])
        if inner is None:
            kind = _kind(schema["properties"][name], definitions)
            yield f"`{key}`", kind, f"`{json.dumps(default)}`", meaning
            continue
        if default is None:
            yield f"`{key}`", "section or null", "`null`", meaning
        yield from _rows(inner, definitions[inner.__name__], definitions, f"{key}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that holds a section, possibly an optional one."""
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kind(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return _kind(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return " or ".join(_kind(part, definitions) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return "list of " + ", ".join(_kind(item, definitions) for item in items)
    bounds = {"exclusiveMinimum": ">", "minimum": "at least", "maximum": "at most"}
    words = [f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema]
    names = {"boolean": "bool", "integer": "int", "number": "float", "string": "str"}
    kind = names.get(schema["type"], schema["type"])
    return " ".join([kind, ", ".join(words)]) if words else kind


def _attribute_docs(cls: type) -> dict[str, str]:
    """The docstring below each attribute of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(doc.value, ast.Constant)
            docs[field.target.id] = inspect.cleandoc(doc.value.value)
    return docs


def _family(family: Family) -> tuple[str, ...]:
    blocks = [block for block in (family.attention, family.linear_attention) if block is not None]
    defaults: dict[str, list[str]] = {}
    for module in (module for block in blocks for module in block.modules if module.bf16):
        defaults.setdefault(module.bf16, []).append(f"`{module.name.rpartition('.')[2]}`")
    caches = {
        "heads": "",
        "latent": "latents in BF16, without scales",
        "none": "none in layers of linear attention",
    }
    derived = [
        f"`{name.rpartition('.')[2]}`: {what}"
        for block in blocks
        for name, what in block.derived.items()
    ]
    return (
        family.name,
        ", ".join(f"`{kind}`" for kind in family.model_types),
        "; ".join(f"{', '.join(names)}: {why}" for why, names in defaults.items()),
        "; ".join(filter(None, (caches[block.kv] for block in blocks))),
        "; ".join(derived),
        "; ".join(f"{side}: {what}" for side, what in family.missing.items()),
    )


def _metrics(meanings: dict[str, str]) -> list[str]:
    rows = [(f"`{name}`", _plain(meaning)) for name, meaning in meanings.items()]
    return _table(("metric", "meaning"), rows)


def _plain(doc: str) -> str:
    """A docstring as Markdown in a cell of a table."""
    text = " ".join(doc.split()).replace("``", "`").removesuffix(".")
    return text[:1].lower() + text[1:] if text[1:2] == " " or text[1:2].islower() else text


def _commands() -> list[tuple[str, ...]]:
    """The first line of each command's help; ``--help`` has the rest."""
    rows = _commands_of(get_command(build_app(PluginManager())), "fp8rl")
    return sorted(rows, key=lambda row: row[0].strip("`"))


def _commands_of(group: Any, path: str) -> Iterable[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield f"`{path} {name}`", (command.help or "").split("\n")[0].removesuffix(".")
        if hasattr(command, "commands"):
            yield from _commands_of(command, f"{path} {name}")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
    sys.stdout.write(f"{FILE} was written.\n")
