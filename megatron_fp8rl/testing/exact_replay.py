"""The trainer's half of ``fp8rl exact``: give Megatron's modules what vLLM's took, and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from transformers import AutoConfig

from fp8rl import Recipe
from fp8rl.kernels import implementation
from fp8rl.models.folder import read_tensors
from fp8rl.plugins.adapters import Compared, ExactRequest
from megatron_fp8rl.conversion import convert
from megatron_fp8rl.export import load_hf
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.layers.exact import ExactSelfAttention
from megatron_fp8rl.testing.cpu_shim import CpuShim
from megatron_fp8rl.testing.models import build_gpt


def replay(request: ExactRequest) -> list[Compared]:
    """Compare in a process of its own; see :class:`fp8rl.plugins.adapters.EngineAdapter`."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_replay, request).result()


def _replay(request: ExactRequest) -> list[Compared]:
    record = torch.load(request.record)
    with alone(record["device"]), torch.no_grad():
        model = trainer(request.model, request.recipe, record)
        return compare(model, record)


@contextmanager
def alone(device: str) -> Iterator[None]:
    """Megatron's parallel state over this process, on ``cpu`` or ``cuda``."""
    shim = CpuShim().active() if device == "cpu" else nullcontext()
    with shim, tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1234)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def trainer(folder: Path, recipe: Recipe, record: dict[str, Any]) -> Any:
    """Build the model of a folder with the local spec, as the recipe says."""
    options = {"bias_activation_fusion": True, "use_cpu_initialization": record["device"] == "cpu"}
    model = build_gpt(AutoConfig.from_pretrained(folder), **options)
    load_hf(model, read_tensors(folder), allow_cast=True)
    model = model.to(record["device"]).eval()
    convert(model, recipe)
    if recipe.kv_cache.in_training and recipe.kv_cache.dtype != "auto":
        cache = KVCacheInTraining(model, recipe.kv_cache.dtype)
        if record["scales"]:
            cache.set(record["scales"])
    return model


def compare(model: Any, record: dict[str, Any]) -> list[Compared]:
    """Return a row for each module, in the order of the model, then one for log-probabilities."""
    tokens, logprobs = record["traced"]
    rows = _Rows(record)
    ids = torch.tensor([tokens[:-1]], device=record["device"])
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rows.add("model.embed_tokens", model.embedding(ids, positions)[:, 0])
    for number, layer in enumerate(model.decoder.layers):
        _compare_layer(rows, f"model.layers.{number}.", layer, model)
    rows.add("model.norm", model.decoder.final_layernorm(rows.sum("model.norm")[:, None])[:, 0])
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    (hidden,), (logits,) = rows.of("logits_processor")
    rows.add("lm_head", model.output_layer(hidden[:, None], weight=weight)[0][:, 0], logits)
    sampled = torch.tensor(tokens[-len(logprobs) :], device=ids.device)
    rows.add("log-probabilities", _logprobs(logits, sampled), logprobs)
    found, expected = [], []
    for text, answer in record["answers"]:
        ids = torch.tensor([text], device=record["device"])
        whole = model(ids, torch.arange(len(text), device=ids.device)[None], None)[0]
        first = len(text) - len(answer)
        found.append(_logprobs(whole[first - 1 : -1], ids[0, first:]))
        expected.append(answer)
    rows.add("log-probabilities, end to end", torch.cat(found), torch.cat(expected))
    return rows.found


def _compare_layer(rows: _Rows, name: str, layer: Any, model: Any) -> None:
    attention = layer.self_attention
    heads, kv_heads = attention.config.num_attention_heads, attention.config.num_query_groups
    size = attention.config.kv_channels
    norm = f"{name}input_layernorm"
    rows.add(norm, layer.input_layernorm(rows.sum(norm)[:, None])[:, 0])

    (hidden, *_), (qkv, *_) = rows.of(f"{name}self_attn.qkv_proj")
    mixed = attention.linear_qkv(hidden[:, None])[0].view(len(hidden), kv_heads, -1, size)
    group = heads // kv_heads  # of each KV head Megatron has the queries, the key and the value
    parts = mixed.split([group, 1, 1], 2)
    rows.add(f"{name}self_attn.qkv_proj", torch.cat([x.flatten(1) for x in parts], 1), qkv)

    query, key, _ = qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)
    before = [query.view(-1, heads, size), key.view(-1, kv_heads, size)]
    ours = (attention.q_layernorm, attention.k_layernorm)
    for place, (leaf, module) in enumerate(zip(("q_norm", "k_norm"), ours, strict=True)):
        if f"{name}self_attn.{leaf}" in rows.modules:
            (x,), (y,) = rows.of(f"{name}self_attn.{leaf}")
            rows.add(f"{name}self_attn.{leaf}", module(x.view_as(before[place])).view_as(y), y)
            before[place] = y.view_as(before[place])

    (query, key, value, *_), (out, *_) = rows.of(f"{name}self_attn.attn")
    for leaf, x, y in zip("qk", _rotated(attention, before, model), (query, key), strict=True):
        rows.add(f"{name}self_attn.rotary_emb ({leaf})", x.view_as(y), y)
    query, key, value = (x.view(len(x), 1, -1, size) for x in (query, key, value))
    context = attention.core_attention(query, key, value, None)
    rows.add(f"{name}self_attn.attn", context.view_as(out), out)

    (context, *_), (out, *_) = rows.of(f"{name}self_attn.o_proj")
    rows.add(f"{name}self_attn.o_proj", attention.linear_proj(context[:, None])[0][:, 0], out)
    norm = f"{name}post_attention_layernorm"
    rows.add(norm, layer.pre_mlp_layernorm(rows.sum(norm)[:, None])[:, 0])
    (hidden, *_), (out, *_) = rows.of(f"{name}mlp")
    rows.add(f"{name}mlp", layer.mlp(hidden[:, None])[0][:, 0], out)


def _rotated(attention: Any, pair: list[Tensor], model: Any) -> Iterable[Tensor]:
    """Rotate a query and a key ``[tokens, heads, head_size]`` as the trainer's attention does."""
    query = pair[0]
    if isinstance(attention, ExactSelfAttention):
        positions, table = attention.exact_rotation.at(query[:, None], None)
        return implementation(query, "rotary").rotate(*pair, positions, table)
    angles = model.rotary_pos_emb(len(query))
    return [apply_rotary_pos_emb(x[:, None], angles, model.config)[:, 0] for x in pair]


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return implementation(logits, "logprobs").token_logprobs(logits.contiguous(), ids)[0]


class _Rows:
    """The rows that have been compared, and what the rollout wrote."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.modules = record["modules"]
        self.found: list[Compared] = []
        self._device = record["device"]

    def of(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return inputs and outputs of a module of the rollout."""
        taken, given = self.modules[name]
        return [x.to(self._device) for x in taken], [x.to(self._device) for x in given]

    def sum(self, norm: str) -> Tensor:
        """Return what a norm normalizes: its input, or the sum with the residual."""
        taken, given = self.of(norm)
        return given[1] if len(given) > 1 else taken[0]

    def add(self, name: str, ours: Tensor, theirs: Tensor | None = None) -> None:
        """Compare with the first output of the rollout's module, or with ``theirs``."""
        theirs = self.of(name)[1][0] if theirs is None else theirs
        assert ours.shape == theirs.shape, name  # "==" would broadcast
        # Bits, because NaN is not equal to itself, and 0 is to -0.
        bits = {2: torch.int16, 4: torch.int32}[theirs.dtype.itemsize]
        equal = ours.to(theirs.device, theirs.dtype).view(bits) == theirs.view(bits)
        self.found.append(Compared(name, int(equal.sum()), equal.numel()))
