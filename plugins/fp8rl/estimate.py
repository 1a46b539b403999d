"""Estimate time and memory of a step of RL on one GPU, in BF16 and in FP8.

The time of a product is ``hypot(FLOPs / measured FLOP/s, bytes / measured bandwidth)``. Attention
of a decode step reads the KV cache at a measured bandwidth. The rest is bytes that were counted, or
taken from the profile of a decode step. :mod:`fp8rl.measured` has the numbers. docs/estimate.md
compares the result with runs, and says what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, isnan, log, nan
from typing import Any, Literal, NamedTuple

from fp8rl.adapters import Section
from fp8rl.errors import ModelError, OptionError, UnsupportedError
from fp8rl.families import (
    FUSED,
    check_count,
    expert_count,
    known_family,
    known_type,
    language_config,
    unsupported_reason,
    value_of,
)
from fp8rl.measured import (
    ADAM_BYTES_MOVED,
    ALL_TO_ALL,
    ATTENTION,
    ATTENTION_FLOPS,
    CHUNKED_LOSS_BYTES_MOVED,
    DECODE,
    ENGINE_BYTES,
    EXPERTS,
    FLOPS,
    GPU,
    GPUS,
    HOST_LAYER,
    LOSS_BYTES_MOVED,
    MEASURED_HIDDEN,
    MEASURED_LENGTH,
    MEASURED_LINEARS,
    PERMUTATION_BYTES_MOVED,
    PROFILED_REQUESTS,
    QUANTIZE,
    ROLLOUT_EXPERTS,
    ROUTING_WAIT,
    SAMPLER_BYTES_MOVED,
    Engine,
    Phase,
    Precision,
    Product,
)
from fp8rl.pinning import PinRow
from fp8rl.recipe import KVDtype, Recipe
from fp8rl.sizes import ADAM_BYTES, GIB, Bytes, Sizes, gib

MICRO_BATCH = 8192
"""Tokens of a micro-batch in training, and of a batch of prompts."""
MEMORY_SHARE = 0.9
"""vLLM's ``gpu_memory_utilization``."""
_HIDDEN_PASSES, _HEAD_PASSES, _INNER_PASSES = 13, 12, 3
"""Reads and writes of the elementwise kernels in a layer's forward: of the residual stream (norms,
residual sums), of queries and keys (norms, rotary embedding), and of SwiGLU's output width. A
backward has twice as many."""
Loss = Literal["one pass", "Megatron", "NeMo RL", "NeMo RL in chunks"]
"""How the trainer computes logprobs and the loss from logits: in one kernel for each direction, as
fp8rl's worker for NeMo RL or Megatron's ``cross_entropy_loss_fusion`` do; as Megatron does without
(``megatron/core/tensor_parallel/cross_entropy.py``); as NeMo RL does, without and with
``policy.logprob_chunk_size`` (``nemo_rl/distributed/model_utils.py``)."""
_LOSS_BYTES: dict[Loss, tuple[float, float]] = {
    "one pass": (6, 12),
    "Megatron": (38, 52),
    "NeMo RL": (38, LOSS_BYTES_MOVED),
    "NeMo RL in chunks": (
        CHUNKED_LOSS_BYTES_MOVED["log-probabilities"],
        CHUNKED_LOSS_BYTES_MOVED["forward and backward"],
    ),
}
"""Bytes that it moves for one logit, forward alone; forward and backward. Whole numbers are
counted, the others measured."""
_DOWN = ("down_proj", "w2")
"""Names of the last linear of an MLP."""
_LINEARS = frozenset(("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "experts"))


class Load(NamedTuple):
    """Requests of a rollout, all of the same lengths."""

    requests: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read ``requests x tokens in x tokens out``, e.g. ``256x512x1024``.

        Raises:
            OptionError: the text says something else.
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(
            part.isascii() and part.isdigit() and len(part) < 8 and int(part) for part in parts
        ):
            raise OptionError(
                f"--load is '{text}'; give requests x tokens in x tokens out, each from 1 to "
                "9999999, e.g. 256x512x1024."
            )
        return cls(*map(int, parts))

    @property
    def length(self) -> int:
        """Tokens of a request when it ends."""
        return self.tokens_in + self.tokens_out

    @property
    def micro_batches(self) -> tuple[int, float]:
        """Tokens of a micro-batch of the trainer, and how many such it has; the last may be part
        of one."""
        tokens = self.requests * self.length
        batch = min(tokens, MICRO_BATCH)
        return batch, tokens / batch


def find_gpu(name: str) -> GPU:
    """Return the table of a GPU.

    Raises:
        UnsupportedError: it has none.
    """
    if name.lower() not in GPUS:
        raise UnsupportedError(
            f"No kernels have been measured on a GPU '{name}'; give --gpu one of these: "
            f"{', '.join(GPUS)}."
        )
    return GPUS[name.lower()]


@dataclass(frozen=True)
class Linear:
    """A linear layer, with fused parts as one, or all experts of a layer."""

    name: str
    outputs: int
    inputs: int
    fp8: bool
    experts: int = 0
    """Number of experts; 0 for a layer that all tokens visit."""
    top: int = 1
    """Experts of a token."""
    ep: int = 1
    """GPUs that share the experts, each with tokens of its own."""

    @property
    def local(self) -> int:
        """Weights of this shape on a GPU."""
        return self.experts // self.ep if self.experts else 1


class Model:
    """Shapes of a model on one GPU.

    Args:
        config: values of the model's ``config.json``.
        rows: resolved table of its modules.
        tp: tensor parallel size.
        ep: GPUs that share the experts in training.

    Raises:
        ModelError: the config lacks a key, or has a value that no model has.
        UnsupportedError: the family is not known, or its attention has not been measured.
        OptionError: the model cannot be split like this.
    """

    def __init__(
        self, config: Mapping[str, Any], rows: Sequence[PinRow], tp: int = 1, ep: int = 1
    ) -> None:
        _require_measured(config)
        self._sizes, self._rows = Sizes.from_dict(config, tp), rows
        if problem := self._sizes.split_problem():
            raise OptionError(f"--tp: {problem}")
        self.layers = sum(row.kind == "o_proj" for row in rows)
        self.heads = self._sizes.heads * self._sizes.head_size
        """Width of the queries."""
        self.kv_heads = self._sizes.kv_heads * self._sizes.head_size
        self.linears = Counter(self._linears(config))
        """Each with the number of layers that have it."""
        experts, self.experts_of_token = _experts(config)
        self.expert_layers = sum(
            count
            for linear, count in self.linears.items()
            if linear.experts and linear.name in _DOWN
        )
        """Layers with experts; 0 in a dense model."""
        if ep > 1 and (not experts or experts % ep):
            raise OptionError(
                f"--ep is {ep}, and the model has {experts or 'no'} experts in a layer; give a "
                "divisor of their number, or leave it out."
            )
        self.ep = ep
        self.trained = Counter(
            {
                replace(linear, ep=ep) if linear.experts else linear: count
                for linear, count in self.linears.items()
            }
        )
        """The same in the trainer."""
        embedding = next(row.name for row in rows if row.kind == "embed_tokens")
        vocabulary, hidden = self._sizes.shape(embedding)
        self.head = Linear("lm_head", vocabulary, hidden, fp8=False)
        whole = self._sizes.elements(rows)
        of_experts = self._sizes.elements([row for row in rows if row.kind == "experts"])
        self.parameters = whole - of_experts + of_experts // ep
        """Parameters on a GPU that trains."""
        self.optimized = whole // ep
        """Of these, those whose optimizer states it holds: Megatron's distributed optimizer shares
        out the parameters that all ``ep`` GPUs have."""

    def bytes(self, fp8: bool, kv: KVDtype) -> Bytes:
        """Return the bytes of weights and KV cache in vLLM."""
        rows = self._rows if fp8 else [replace(row, precision="bf16") for row in self._rows]
        return self._sizes.bytes(rows, 2, kv)

    def _linears(self, config: Mapping[str, Any]) -> Iterator[Linear]:
        experts, top = _experts(config)
        fused = {part: name for name, parts in FUSED.items() for part in parts}
        found: dict[tuple[str, str], Linear] = {}
        for row in self._rows:
            sparse = row.kind == "experts"
            if row.kind not in _LINEARS or (sparse and ".experts.0." not in row.name):
                continue
            prefix, _, leaf = row.name.rpartition(".")
            name, (outputs, inputs) = fused.get(leaf, leaf), self._sizes.shape(row.name)
            if (prefix, name) in found:
                outputs += found[prefix, name].outputs
            linear = Linear(name, outputs, inputs, row.precision == "fp8")
            found[prefix, name] = replace(linear, experts=experts, top=top) if sparse else linear
        yield from found.values()


def require_served(config: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UnsupportedError if a model does not run in FP8 as the recipe says."""
    for side, rollout, training in (
        ("rollout", recipe.rollout, False),
        ("training", False, recipe.training),
    ):
        if reason := unsupported_reason(config, rollout=rollout, training=training):
            raise UnsupportedError(
                f"fp8rl does not serve {reason}; set it to false: --recipe '{{\"{side}\": false}}'."
            )


def _require_measured(config: Mapping[str, Any]) -> None:
    family, kind = known_family(config), value_of(language_config(config), "model_type")
    if not known_type(config):
        raise UnsupportedError(
            f"No family has the model_type '{kind}', so the model's shapes are not known; take a "
            "model of a family in docs/reference.md."
        )
    if family.attention.kv == "latent" or family.linear_attention is not None:
        what = "multi-latent" if family.attention.kv == "latent" else "linear"
        raise UnsupportedError(
            f"'{kind}' has {what} attention, which has not been measured; measure the model with "
            "benchmarks/rollout.py instead."
        )


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of experts of a layer and of a token; 0 and 1 for a dense model."""
    text, key = language_config(config), "num_experts_per_tok"
    experts = expert_count(known_family(config), text)
    if not experts:
        return 0, 1
    if key not in text:
        raise ModelError(f"The model's config.json has no key '{key}'; correct it.")
    return experts, check_count(key, text[key], experts)


def product(gpu: GPU, linear: Linear, tokens: float, fp8: bool, kind: Product = "fprop") -> float:
    """Return the seconds of one product of a linear layer; of experts as if they were one."""
    precision: Precision = "fp8" if fp8 else "bf16"
    size, weights = 1 if fp8 else 2, float(linear.outputs * linear.inputs)
    rows = tokens * linear.top
    flops = 2 * rows * weights
    if linear.experts:  # experts that no token visits are not read
        weights *= linear.local * (1 - (1 - linear.top / linear.experts) ** (tokens * linear.ep))
    moved: float = rows * (linear.inputs * size + linear.outputs * 2)
    moved += weights * (8 if kind == "wgrad" else size)  # reads and writes a float32 gradient
    return hypot(flops / FLOPS[precision][kind], moved / gpu.copy)


def experts_factor(linear: Linear, tokens: float, fp8: bool) -> float:
    """Return how many times longer experts take in training than :func:`product` says.

    Between the measured numbers of tokens of an expert it goes with their logarithm; beyond them it
    stays. It is 1 for a layer that all tokens visit.
    """
    if not linear.experts:
        return 1.0
    precision: Precision = "fp8" if fp8 else "bf16"
    few, many = sorted(EXPERTS)
    each = min(max(tokens * linear.top / linear.local, few), many)
    way = log(each / few) / log(many / few)
    return EXPERTS[few][precision] * (1 - way) + EXPERTS[many][precision] * way


def linear_seconds(
    gpu: GPU, linear: Linear, tokens: float, fp8: bool, *, training: bool = False
) -> float:
    """Return the seconds of a linear layer in the trainer, which quantizes weights each time.

    Args:
        gpu: table of the GPU.
        linear: the layer.
        tokens: tokens of the micro-batch.
        fp8: whether its products are in FP8.
        training: forward and backward; else forward alone.
    """
    kinds: tuple[Product, ...] = ("fprop", "dgrad", "wgrad") if training else ("fprop",)
    seconds = sum(product(gpu, linear, tokens, fp8, kind) for kind in kinds)
    factor = experts_factor(linear, tokens, fp8)
    if not fp8:
        return factor * seconds
    rows, each = tokens * linear.top, 4 if training else 3  # reads 2 bytes, writes 1 for each side
    moved: float = each * linear.outputs * linear.inputs * linear.local
    # The kernels of SwiGLU quantize what they compute, without a read of their own.
    moved += rows * linear.inputs * (each - 2 * (linear.name == "down_proj"))
    if training:
        moved += rows * linear.outputs * (4 - 2 * (linear.name == "gate_up_proj"))
    return factor * (seconds + moved / (QUANTIZE * gpu.copy))


def attention_seconds(model: Model, tokens: float, sequence: float) -> float:
    """Return the seconds of a forward of causal attention."""
    return 2 * tokens * sequence * model.heads * model.layers / ATTENTION_FLOPS


def elementwise_seconds(gpu: GPU, model: Model, tokens: float) -> float:
    """Return the seconds of a forward's norms, residual sums, rotary embedding and SwiGLU."""
    widths = _HIDDEN_PASSES * model.head.inputs + _HEAD_PASSES * (model.heads + model.kv_heads)
    inner = sum(
        linear.inputs * linear.top * count
        for linear, count in model.linears.items()
        if linear.name in _DOWN
    )
    return 2 * tokens * (widths * model.layers + _INNER_PASSES * inner) / gpu.copy


def trainer_seconds(
    gpu: GPU,
    model: Model,
    tokens: float,
    sequence: float,
    fp8: bool,
    *,
    training: bool = False,
    loss: Loss = "NeMo RL",
    recompute: bool = False,
) -> float:
    """Return the seconds of a micro-batch in the trainer, without the optimizer.

    Args:
        gpu: table of the GPU.
        model: the model.
        tokens: tokens of the micro-batch.
        sequence: length of its sequences.
        fp8: whether linear layers are in FP8, but for those that are pinned.
        training: forward and backward; else a forward that gives logprobs.
        loss: how logprobs and the loss are computed.
        recompute: whether the backward computes the layers' activations again.
    """
    seconds = layers_seconds(gpu, model, tokens, sequence, fp8, training=training)
    seconds += linear_seconds(gpu, model.head, tokens, False, training=training)
    if training and recompute:
        seconds += layers_seconds(gpu, model, tokens, sequence, fp8)
    return seconds + loss_seconds(gpu, model, tokens, loss, training=training)


def loss_seconds(gpu: GPU, model: Model, tokens: float, loss: Loss, *, training: bool) -> float:
    """Return the seconds from logits to logprobs and, in training, to their gradient."""
    return _LOSS_BYTES[loss][training] * tokens * model.head.outputs / gpu.copy


def layers_seconds(
    gpu: GPU, model: Model, tokens: float, sequence: float, fp8: bool, *, training: bool = False
) -> float:
    """Return the seconds of a micro-batch in the layers alone; see :func:`trainer_seconds`."""
    seconds = sum(
        count * linear_seconds(gpu, linear, tokens, fp8 and linear.fp8, training=training)
        for linear, count in model.trained.items()
    )
    seconds += routing_seconds(gpu, model, tokens, fp8, training=training)
    seconds += (3.5 if training else 1) * attention_seconds(model, tokens, sequence)
    return seconds + (3 if training else 1) * elementwise_seconds(gpu, model, tokens)


def routing_seconds(
    gpu: GPU, model: Model, tokens: float, fp8: bool, *, training: bool = False
) -> float:
    """Return the seconds of a micro-batch in which tokens are sorted by expert and back, are sent
    to the GPUs of their experts and back, and in which the GPU waits for the host that must know
    their numbers; 0 for a dense model."""
    phase: Phase = "forward and backward" if training else "log-probabilities"
    sorted_numbers = tokens * model.experts_of_token * model.head.inputs
    seconds = PERMUTATION_BYTES_MOVED[phase] * sorted_numbers / gpu.copy
    sent = 2 * sorted_numbers * (model.ep - 1) / model.ep
    seconds += (4 if training else 2) * sent / ALL_TO_ALL
    seconds += ROUTING_WAIT["fp8" if fp8 else "bf16"][phase]
    return model.expert_layers * seconds


def optimizer_seconds(gpu: GPU, model: Model) -> float:
    """Return the seconds of a step of Adam."""
    return model.optimized * ADAM_BYTES_MOVED / gpu.copy


@dataclass(frozen=True)
class Rollout:
    """Time and memory of a rollout."""

    seconds: float
    tokens_per_second: float
    """Tokens out per second."""
    requests: float
    """Requests of the load that the cache holds at once; below 1 there is no time."""
    memory: Bytes


def rollout(
    gpu: GPU, model: Model, load: Load, engine: Engine, *, fp8: bool, kv: KVDtype
) -> Rollout:
    """Estimate a rollout of vLLM; requests that the cache cannot hold wait for others to end.

    Args:
        gpu: table of the GPU.
        model: the model.
        load: the requests.
        engine: whose kernels run.
        fp8: whether linear layers are in FP8, but for those that are pinned.
        kv: dtype of the KV cache.
    """
    memory = model.bytes(fp8, kv)
    room = MEMORY_SHARE * gpu.memory * GIB - ENGINE_BYTES - memory.weights
    fit = room / (memory.kv_per_token * load.length)
    requests = min(load.requests, fit)
    if requests < 1:
        return Rollout(nan, nan, max(requests, 0), memory)
    cached: float = requests * (load.tokens_in + load.tokens_out / 2) * memory.kv_per_token
    share = ATTENTION["bf16" if kv == "auto" else engine, kv]
    step = _products(gpu, model, requests, fp8) + cached / (share * gpu.copy)
    small = DECODE[engine if fp8 else "bf16"].layer
    step += model.layers * small * max(1, requests / PROFILED_REQUESTS)
    step += product(gpu, model.head, requests, fp8=False)
    step += requests * model.head.outputs * SAMPLER_BYTES_MOVED / gpu.copy
    tokens = load.requests * load.tokens_in
    batch = min(tokens, MICRO_BATCH)
    prompts = _products(gpu, model, batch, fp8) + elementwise_seconds(gpu, model, batch)
    prompts += attention_seconds(model, batch, load.tokens_in)
    seconds = load.requests / requests * load.tokens_out * step + tokens / batch * prompts
    return Rollout(seconds, load.requests * load.tokens_out / seconds, requests, memory)


def _products(gpu: GPU, model: Model, tokens: float, fp8: bool) -> float:
    """Return the seconds of the products of all layers in vLLM."""
    seconds = 0.0
    for linear, count in model.linears.items():
        in_fp8 = fp8 and linear.fp8
        factor = ROLLOUT_EXPERTS["fp8" if in_fp8 else "bf16"] if linear.experts else 1
        seconds += count * factor * product(gpu, linear, tokens, in_fp8)
    return seconds


def sections(
    gpu: GPU,
    model: Model,
    load: Load,
    recipe: Recipe,
    tp: int,
    *,
    losses: tuple[Loss, Loss],
    recompute: bool,
) -> tuple[Section, Section]:
    """Estimate a step in BF16, with vLLM's own FP8 and with fp8rl: tables of time and memory.

    Args:
        gpu: table of the GPU.
        model: the model, split over ``tp`` GPUs.
        load: requests of the step's rollout, whose tokens are then trained on.
        recipe: says what fp8rl has in FP8.
        tp: tensor parallel size, for the title.
        losses: how BF16 and fp8rl compute logprobs and the loss.
        recompute: whether the backward computes the layers' activations again.

    Raises:
        UnsupportedError: the GPU has no room for one request in any of them.
    """
    kv = recipe.kv_cache.dtype
    rollouts = (
        rollout(gpu, model, load, "bf16", fp8=False, kv="auto"),
        rollout(gpu, model, load, "stock", fp8=True, kv=kv),
        rollout(gpu, model, load, "fp8rl", fp8=recipe.rollout, kv=kv),
    )
    if all(found.requests < 1 for found in rollouts):
        raise UnsupportedError(
            f"{gib(rollouts[-1].memory.weights)} of weights leave no room for one request of "
            f"{load.length:,} tokens on an {gpu.name} ({gpu.memory} GiB); "
            "raise --tp or give a shorter --load."
        )
    batch, batches = load.micro_batches
    rows: list[tuple[str, float, float, float]] = [
        ("rollout", rollouts[0].seconds, rollouts[1].seconds, rollouts[2].seconds)
    ]
    for name, training in (("log-probabilities", False), ("forward and backward", True)):
        plain, fp8 = (
            batches
            * trainer_seconds(
                gpu,
                model,
                batch,
                load.length,
                fp8,
                training=training,
                loss=loss,
                recompute=recompute,
            )
            for fp8, loss in zip((False, recipe.training), losses, strict=True)
        )
        rows.append((name, plain, nan, fp8))
    rows.append(("optimizer", adam := optimizer_seconds(gpu, model), nan, adam))
    rows.append(("sum", sum(row[1] for row in rows), nan, sum(row[3] for row in rows)))
    where = f"{tp} {gpu.name}s, TP {tp}" if tp > 1 else f"one {gpu.name}"
    if model.ep > 1:
        where += f", trained with EP {model.ep}, each GPU on a load of its own"
    times = Section(
        f"seconds of {load.requests:,} x ({load.tokens_in:,}, {load.tokens_out:,}) on {where}",
        ("", "BF16", "vLLM's own FP8", "fp8rl", "over BF16"),
        (
            *((name, *map(_number, found), _number(found[0] / found[2])) for name, *found in rows),
            ("tokens out a second", *(_number(each.tokens_per_second) for each in rollouts), ""),
        ),
    )
    trained = {
        "training: weights": 2 * model.parameters,
        "gradients, float32": 4 * model.parameters,
        "main weights, Adam's moments": ADAM_BYTES * model.optimized,
    }
    memory = Section(
        f"memory of a GPU, which has {gpu.memory} GiB",
        ("", "BF16", "vLLM's own FP8", "fp8rl"),
        (
            ("rollout: weights", *(gib(each.memory.weights) for each in rollouts)),
            ("KV cache, bytes a token", *(f"{each.memory.kv_per_token:,}" for each in rollouts)),
            ("requests at once", *(f"{int(each.requests):,}" for each in rollouts)),
            *((name, gib(held), "-", gib(held)) for name, held in trained.items()),
        ),
    )
    return times, memory


def _number(value: float) -> str:
    if isnan(value):
        return "-"
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def smallest_micro_batch(gpu: GPU, model: Model, sequence: float, *, training: bool) -> int:
    """Return the tokens of a micro-batch in FP8 below which the GPU may wait for the host.

    That is where the GPU takes as long for a micro-batch as a host that was measured; narrower
    models need more tokens. With experts, where the GPU waits in any micro-batch, it is where the
    GPU works as long as it waits.

    Args:
        gpu: table of the GPU.
        model: the model.
        sequence: length of the sequences.
        training: forward and backward; else a forward that gives logprobs.
    """
    phase: Phase = "forward and backward" if training else "log-probabilities"
    seconds = trainer_seconds(gpu, model, MICRO_BATCH, sequence, True, training=training)
    if model.expert_layers:
        waits = model.expert_layers * ROUTING_WAIT["fp8"][phase]
        return round(MICRO_BATCH * waits / (seconds - waits))
    # The host's time contains NeMo RL's loss, and so does the GPU's here.
    return round(MICRO_BATCH * HOST_LAYER[phase] * model.layers / seconds)


def notes(
    gpu: GPU,
    model: Model,
    load: Load,
    tp: int,
    recipe: Recipe,
    *,
    losses: tuple[Loss, Loss],
    recompute: bool,
) -> Iterator[str]:
    """Yield a sentence each: what was measured, what goes beyond that, and what is left out.

    The arguments are those of :func:`sections`.
    """
    beyond = [gpu.extrapolated] if gpu.extrapolated else []
    if model.head.inputs != MEASURED_HIDDEN:
        beyond.append(f"a hidden size of {model.head.inputs:,} (measured {MEASURED_HIDDEN:,})")
    shapes = {(linear.outputs, linear.inputs) for linear in model.linears if not linear.experts}
    if not shapes <= MEASURED_LINEARS:
        beyond.append("linear layers of other shapes")
    if model.expert_layers:
        beyond.append("experts, measured in training alone and with 512 and 4,096 tokens each")
    if not 64 <= load.requests <= PROFILED_REQUESTS:
        beyond.append(f"a load of {load.requests:,} requests (compared with runs of 64 and 256)")
    if load.length > MEASURED_LENGTH:
        beyond.append(
            f"{load.length:,} tokens a request (compared with runs of up to {MEASURED_LENGTH:,})"
        )
    if tp > 1 or model.ep > 1:
        beyond.append("the split over GPUs")
    yield "Measured: kernels of Qwen3-8B's shapes on one H100."
    yield f"Extrapolated: {'; '.join(beyond) or 'nothing'}."
    waits = " (except where experts' tokens are counted in training)" if model.expert_layers else ""
    sent = " (except experts' tokens in training)" if model.ep > 1 else ""
    yield (
        f"Left out: waits of the GPU for the host{waits}, communication{sent}, Ray, refits, sleep "
        "and wake-up, and in memory the activations of training."
    )
    if losses[0] != losses[1]:
        plain, own = (
            sum(
                loss_seconds(gpu, model, load.requests * load.length, loss, training=training)
                for training in (False, True)
            )
            for loss in losses
        )
        yield (
            f"{_number(plain - own)} s of what fp8rl gains are not FP8's: it goes over the logits "
            "once, where NeMo RL has an operation after the other. Add them to its sum for FP8's "
            "own part."
        )
    if recipe.training and not model.expert_layers:
        least = max(
            smallest_micro_batch(gpu, model, load.length, training=training)
            for training in (False, True)
        )
        yield (
            f"Micro-batches below about {least:,} tokens may leave the GPU waiting for the host; "
            "FP8 gives less there."
        )
    if model.expert_layers:
        wait = ROUTING_WAIT["fp8" if recipe.training else "bf16"]
        batch, batches = load.micro_batches
        forward, both = wait["log-probabilities"], wait["forward and backward"]
        seconds = batches * model.expert_layers * (forward * (1 + recompute) + both)
        yield (
            f"{_number(seconds)} s of fp8rl's sum are waits of the GPU for the host in layers with "
            f"experts, in micro-batches of {batch:,} tokens; micro-batches of twice as many "
            "have half of them."
        )
    needed = (2 + 4) * model.parameters + ADAM_BYTES * model.optimized
    if needed > gpu.memory * GIB:
        yield (
            f"Training needs {gib(needed)} and activations, more than a GPU has: its seconds are "
            "those of one GPU with room enough, to be divided by the number that share the work."
        )
