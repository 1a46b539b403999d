"""The kernels of ``exact``: the same bits for a token in any batch, and right by float64."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

from fp8rl.kernels.rotary_table import cos_sin_table, inverse_frequencies
from fp8rl.numerics import fake_quantize_int8_kv, fake_quantize_kv, quantize_group
from support.shapes import HALF_GROUPS

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
kernels = pytest.importorskip("fp8rl.kernels.attention")
paged = pytest.importorskip("fp8rl.kernels.paged")
norm = pytest.importorskip("fp8rl.kernels.norm")
rotary = pytest.importorskip("fp8rl.kernels.rotary")
logprobs = pytest.importorskip("fp8rl.kernels.logprobs")

DEVICE = torch.device("cuda")
PAGE = 16
SHAPES = [(32, 4, 128), (9, 3, 64), (8, 4, 256)]
"""Heads, KV heads, head size."""
LENGTHS = (1100, 7, 2049, 300)


class Case(NamedTuple):
    """Sequences of random q, k and v, and what both engines make of them."""

    query: torch.Tensor
    starts: torch.Tensor
    copy: Any
    cache: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    table: torch.Tensor
    keys: torch.Tensor
    """bfloat16, rounded as the cache holds them."""
    values: torch.Tensor
    lengths: torch.Tensor


def make(heads: int, kv_heads: int, size: int, dtype: str, page_size: int = PAGE) -> Case:
    torch.manual_seed(heads + size)
    total = sum(LENGTHS)
    query = (torch.randn(total, heads, size, device=DEVICE) * 2).bfloat16()
    spread = torch.exp(torch.randn(total, kv_heads, 1, device=DEVICE))
    key = torch.randn(total, kv_heads, size, device=DEVICE).bfloat16()
    value = (torch.randn(total, kv_heads, size, device=DEVICE) * spread).bfloat16()
    starts = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=DEVICE)
    lengths = starts.diff()
    by_layer = torch.tensor([2.0**-6, 2.0**-5], device=DEVICE)
    scales = None if dtype == "int8" else by_layer
    if dtype == "bf16":
        copy = kernels.Copy(key, value, None, None, starts[:-1], lengths)
    else:
        copy = kernels.copy_tokens(key, value, starts, longest=max(LENGTHS), scales=scales)
    counts = [-(-length // page_size) for length in LENGTHS]
    order = torch.randperm(sum(counts), device=DEVICE).int()
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32, device=DEVICE)
    shape = (sum(counts), page_size, kv_heads, size)
    cache = [torch.full(shape, float("nan"), device=DEVICE) for _ in range(2)]
    of_rows = [torch.ones(shape[:3], device=DEVICE) for _ in range(2)]
    first = 0
    for row, (count, length, start) in enumerate(
        zip(counts, LENGTHS, starts.tolist(), strict=False)
    ):
        table[row, :count] = order[first : first + count]
        token = torch.arange(length, device=DEVICE)
        page, slot = table[row, token // page_size].long(), token % page_size
        for where, scale, x, k in (
            (cache[0], of_rows[0], key, 0),
            (cache[1], of_rows[1], value, 1),
        ):
            part = x[start : start + length].float()
            if dtype == "int8":
                most = part.abs().amax(-1)  # torch would multiply by 1 / 127
                step = (most / torch.full_like(most, 127.0)).clamp(min=1e-6)
                where[page, slot] = torch.floor(part / step[..., None] + 128.5)
                scale[page, slot] = step
            elif dtype == "bf16":
                where[page, slot] = part
            else:
                where[page, slot] = (part / by_layer[k]).clamp(-448, 448)
        first += count
    codes = {"int8": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}[dtype]
    caches = tuple(x.nan_to_num(200.0).to(codes) if dtype == "int8" else x.to(codes) for x in cache)
    clipped = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    if dtype == "int8":
        keys, values = fake_quantize_int8_kv(key, value)
        of_cache = (of_rows[0], of_rows[1])
    elif dtype == "bf16":
        keys, values, of_cache = key, value, (None, None)
    else:
        keys, values = fake_quantize_kv(key, value, by_layer, clipped)
        of_cache = (by_layer[:1], by_layer[1:])
    return Case(
        query,
        starts,
        copy,
        caches,
        of_cache,
        table,
        keys,
        values,
        lengths,  # type: ignore[arg-type]
    )


def copied(case: Case) -> Any:
    """The copy of all pages that attention over cached prefixes reads."""
    return paged.copy_pages(
        *case.cache,
        case.table,
        case.lengths,
        keys=sum(LENGTHS),
        longest=max(LENGTHS),
        k_scale=case.scales[0],
        v_scale=case.scales[1],
    )


def decoded(case: Case, tokens: torch.Tensor, splits: int) -> torch.Tensor:
    """Decode some tokens of all, each as a request of its own."""
    sequence = torch.searchsorted(case.starts.long(), tokens, right=True) - 1
    return paged.decode(
        case.query[tokens],
        *case.cache,
        case.table[sequence].contiguous(),
        (tokens - case.starts[sequence] + 1).int(),
        softmax_scale=case.query.shape[-1] ** -0.5,
        k_scale=case.scales[0],
        v_scale=case.scales[1],
        ones=paged.ones_like_codes(case.cache[0]),
        out=torch.empty_like(case.query[tokens]),
        splits=splits,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [*((*shape, "e4m3") for shape in SHAPES), (*SHAPES[0], "int8"), (*SHAPES[0], "bf16")],
)
def test_a_token_has_the_same_bits_in_any_batch(heads, kv_heads, size, dtype):
    case = make(heads, kv_heads, size, dtype)
    scale = size**-0.5
    whole, lse = kernels.attend(
        case.query, case.copy, case.starts, longest_query=max(LENGTHS), softmax_scale=scale
    )
    tokens = torch.cat([torch.arange(300), torch.randperm(sum(LENGTHS))[:200]]).to(DEVICE)
    for splits in (1, 2, 4):
        assert torch.equal(decoded(case, tokens, splits), whole[tokens]), splits
    assert torch.equal(decoded(case, tokens[:1], 1), whole[tokens[:1]])

    # The last tokens of each sequence alone, over the cache: chunks and cached prefixes.
    last = [min(length, 45) for length in LENGTHS]
    chosen = torch.cat(
        [torch.arange(e - n, e) for e, n in zip(case.starts[1:].tolist(), last, strict=True)]
    )
    query_starts = torch.tensor([0, *accumulate(last)], dtype=torch.int32, device=DEVICE)
    some, _ = kernels.attend(
        case.query[chosen.to(DEVICE)],
        copied(case),
        query_starts,
        longest_query=45,
        softmax_scale=scale,
    )
    assert torch.equal(some, whole[chosen.to(DEVICE)])

    for start, end in zip(case.starts[:-1].tolist(), case.starts[1:].tolist(), strict=True):
        rows = (x[start:end] for x in (case.query, case.keys, case.values))
        expected, expected_lse = _attended(*rows)
        error = (whole[start:end].double() - expected).norm() / expected.norm()
        assert error < {"int8": 6e-3, "e4m3": 2.5e-3, "bf16": 4e-3}[dtype]
        assert (lse[:, start:end].double() - expected_lse).abs().max() < 2e-2


@pytest.mark.parametrize(("page_size", "dtype"), [(24, "e4m3"), (48, "int8")])
def test_pages_that_no_tile_fits(page_size, dtype):
    """vLLM takes every multiple of 16 as a block size."""
    case, apart = make(8, 4, 64, dtype), make(8, 4, 64, dtype, page_size)
    tokens = torch.arange(0, sum(LENGTHS), 7, device=DEVICE)
    for splits in (1, 4):
        assert torch.equal(decoded(apart, tokens, splits), decoded(case, tokens, splits))
    outs = [
        kernels.attend(
            case.query, copied(each), case.starts, longest_query=max(LENGTHS), softmax_scale=0.125
        )[0]
        for each in (case, apart)
    ]
    assert torch.equal(*outs)


def test_padded_rows_of_a_captured_batch_are_zero():
    case = make(8, 4, 64, "e4m3")
    out = paged.decode(
        case.query[:3],
        *case.cache,
        case.table[:3].contiguous(),
        torch.tensor([5, 0, 0], dtype=torch.int32, device=DEVICE),
        softmax_scale=0.125,
        k_scale=case.scales[0],
        v_scale=case.scales[1],
        ones=paged.ones_like_codes(case.cache[0]),
        out=torch.full_like(case.query[:3], 7.0),
        splits=2,
    )
    assert out[0].abs().sum() > 0 and (out[1:] == 0).all()


@pytest.mark.parametrize("columns", [64, 384, 576, 2560, 8192])
def test_norms(columns):
    torch.manual_seed(0)
    x, residual = (torch.randn(300, columns, device=DEVICE).bfloat16() * 3 for _ in range(2))
    weight = torch.rand(columns, device=DEVICE).bfloat16()
    y, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and torch.equal(y, norm.rms_norm(total, weight, 1e-6))
    for rows in (1, 7):
        assert torch.equal(y[:rows], norm.add_rms_norm(x[:rows], residual[:rows], weight, 1e-6)[0])
    apart = torch.cat((total, x), 1)[:, :columns]
    odd = torch.cat((x.new_zeros(1), total.flatten()))[1:].view(total.shape)
    for same in (apart, odd):  # rows of a wider tensor; rows that vectors of 16 bytes do not fit
        assert torch.equal(norm.rms_norm(same, weight, 1e-6), y)
    wide = total.double()
    expected = wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("form", ["fp32", "pow2"])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_quantized_norms_are_the_norms_quantized(rows, form):
    torch.manual_seed(rows)
    for columns in (128, 384, 2048, 5120, 8192, *HALF_GROUPS, 4672):
        x, residual = (torch.randn(rows, columns, device=DEVICE).bfloat16() * 3 for _ in range(2))
        odd = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
        weight = torch.rand(columns, device=DEVICE).bfloat16()
        y, total = norm.add_rms_norm(x, residual, weight, 1e-6)
        added = norm.rms_norm_quantize(x, residual, weight, 1e-6, form)
        assert torch.equal(added[2], total)
        alone = norm.rms_norm(x, weight, 1e-6)
        for normed, found in (
            (y, added),
            (alone, norm.rms_norm_quantize(x, None, weight, 1e-6, form)),
            (alone, norm.rms_norm_quantize(odd, None, weight, 1e-6, form)),
        ):
            expected = quantize_group(normed, scale_format=form)
            codes, scales = found[0].view(torch.uint8), found[1].t()[:rows]
            assert not codes[:, columns:].any() and codes.shape[1] % 128 == 0, columns
            assert torch.equal(codes[:, :columns], expected.codes.view(torch.uint8)), columns
            assert torch.equal(scales, expected.scale_inv), columns


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_rotation_and_its_gradient(heads, kv_heads, size):
    torch.manual_seed(0)
    fused = torch.randn(50, heads + 2 * kv_heads, size, device=DEVICE).bfloat16()
    query, key = fused[:, :heads], fused[:, heads : heads + kv_heads]  # rows apart, as in a model
    positions = torch.randint(0, 4000, (50,), device=DEVICE)
    table = cos_sin_table(inverse_frequencies(10_000.0, size), 4000, DEVICE)
    found = rotary.rotate(query, key, positions, table)
    back = rotary.rotate(*found, positions, table, back=True)
    for x, y, again in zip((query, key), found, back, strict=True):
        a, b = x.double().chunk(2, -1)
        cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)
        expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-8)
        torch.testing.assert_close(again.double(), x.double(), rtol=2**-6, atol=2**-5)

    weights = [torch.rand(size, device=DEVICE).bfloat16() for _ in range(2)]
    normed = [norm.rms_norm(x, w, 1e-6) for x, w in zip((query, key), weights, strict=True)]
    apart = rotary.rotate(*normed, positions, table)
    for tokens in (slice(None), slice(9, 10)):
        one = rotary.rotate(query[tokens], key[tokens], positions[tokens], table)
        assert all(torch.equal(x, y[tokens]) for x, y in zip(one, found, strict=True))
        for some in ((query, key), (query.contiguous(), key.contiguous())):
            joined = rotary.rotate(
                *(x[tokens] for x in some), positions[tokens], table, norms=(*weights, 1e-6)
            )
            assert all(torch.equal(x, y[tokens]) for x, y in zip(joined, apart, strict=True))


@pytest.mark.parametrize(("words", "hidden"), [(151_936, 4096), (49_152, 768)])
def test_the_trainers_head_has_the_bits_of_few_rows(words, hidden):
    from fp8rl.kernels import head

    torch.manual_seed(0)
    x = torch.randn(2 * head.ROWS + 300, hidden, device=DEVICE).bfloat16()
    weight = torch.randn(words, hidden, device=DEVICE).bfloat16()
    whole = head.multiply(x, weight.t())
    for count in (1, 3, 16, 77, 256):
        for start in (0, head.ROWS - 1, 2 * head.ROWS + 40):
            rows = slice(start, start + count)
            alone = torch.nn.functional.linear(x[rows], weight)
            assert torch.equal(alone[: len(whole[rows])], whole[rows]), (count, start)


@pytest.mark.parametrize("words", [49_152, 50_001])
def test_log_probabilities(words):
    """Also of views: Megatron's logits are ``[S, B, V]`` in memory, and NeMo RL's packed loss takes
    parts."""
    torch.manual_seed(0)
    logits = (torch.randn(9, 3, words, device=DEVICE) * 4).bfloat16().transpose(0, 1)
    ids = torch.randint(0, words, (3, 9), device=DEVICE)
    whole = logprobs.token_logprobs(logits, ids)
    rows = logprobs.token_logprobs(logits.reshape(-1, words), ids.flatten())
    part = slice(4, 7)
    alone = logprobs.token_logprobs(logits[1:2, part], ids[1:2, part])
    for found, packed, some in zip(whole, rows, alone, strict=True):
        assert torch.equal(found, packed.view(3, 9)) and torch.equal(some, found[1:2, part])
    found, largest, log_sum = whole
    expected = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(largest, logits.float().amax(-1))
    torch.testing.assert_close((largest + log_sum).double(), logits.double().logsumexp(-1))
    outside = torch.tensor([[-100, words, 5]], device=DEVICE)
    found = logprobs.token_logprobs(logits[:1, :3], outside)[0]
    assert (found[0, :2] == 0).all() and found[0, 2] < 0


@pytest.mark.parametrize("dtype", ["e4m3", "int8", "bf16"])
def test_gradients_of_attention_are_those_of_the_rounded_keys(dtype):
    """And zeros for tokens behind the last sequence, as attention itself, whatever is there."""
    pytest.importorskip("megatron.core")
    from types import SimpleNamespace

    from megatron_fp8rl.layers.exact import _Attention

    case = make(8, 2, 64, dtype)
    layer: Any = SimpleNamespace(
        scales=torch.cat(case.scales) if dtype == "e4m3" else None,
        clipped=torch.zeros(2, dtype=torch.int64, device=DEVICE),
    )
    inputs = [x.clone().requires_grad_() for x in (case.query, case.keys, case.values)]
    behind = [torch.cat((x.detach(), x.detach()[:50] / 0)).requires_grad_() for x in inputs]
    layer = None if dtype == "bf16" else layer
    out = _Attention.apply(*behind, case.starts, max(LENGTHS), layer, True)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, behind, grad)
    total = sum(LENGTHS)
    assert all((x[total:] == 0).all() for x in (out, *found))
    found, grad = [x[:total] for x in found], grad[:total]
    rounded = inputs[1:]
    if dtype == "int8":
        rounded = [
            x.requires_grad_() for x in fake_quantize_int8_kv(*(x.detach() for x in rounded))
        ]
    wide = [x.detach().double().requires_grad_() for x in (inputs[0], *rounded)]
    bounds = zip(case.starts[:-1].tolist(), case.starts[1:].tolist(), strict=True)
    parts = [_attended(*(x[start:end] for x in wide))[0] for start, end in bounds]
    expected = torch.autograd.grad(torch.cat(parts), wide, grad.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-2


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention ``[tokens, heads, size]`` of one sequence in float64, and its logsumexp."""
    group, size = q.shape[1] // k.shape[1], q.shape[2]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * size**-0.5
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def _scored(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states ``[b, s, h]`` behind the last norm, and logits ``[b, s, words]``."""
    hidden: list[torch.Tensor] = []
    norm = model.decoder.final_layernorm
    handle = norm.register_forward_hook(lambda module, args, out: hidden.append(out))
    positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
    logits = model(ids, positions, options.pop("mask", None), **options)
    handle.remove()
    return hidden[0].transpose(0, 1), logits


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "fp8_e4m3"), ("llama3", "int8_per_token_head")]
)
def test_transformer_engines_spec_has_the_bits_of_the_local_one(world_of_one, dtype, family):
    """Alone, batched, packed and recomputed; also gradients, whose sums have another order."""
    pytest.importorskip("transformer_engine.pytorch")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from transformers import LlamaConfig, Qwen3Config

    from fp8rl import Recipe
    from fp8rl.kv_scales import scale_names
    from megatron_fp8rl import convert
    from megatron_fp8rl.export import export_hf, load_hf
    from megatron_fp8rl.kv.cache import KVCacheInTraining
    from megatron_fp8rl.layers.exact import ExactNorm
    from megatron_fp8rl.testing.models import build_gpt
    from support.numeric import relative_error

    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    qwen3 = family == "qwen3"
    config = Qwen3Config(**shape) if qwen3 else LlamaConfig(**shape, rope_parameters=rope)
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qwen3)
    options: dict[str, Any] = {"use_cpu_initialization": False, "bias_activation_fusion": True}
    fused = {
        **options,
        "transformer_impl": "transformer_engine",
        "apply_rope_fusion": True,
        "bias_dropout_fusion": True,
    }
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    local = build_gpt(config, **options).cuda()
    te = build_gpt(config, transformer_layer_spec=spec, **fused).cuda()
    again = build_gpt(config, transformer_layer_spec=spec, **fused, **recompute).cuda()
    with torch.no_grad():
        for name, parameter in local.named_parameters():
            if "layernorm" in name:
                parameter.uniform_(0.5, 2)
    recipe = Recipe.from_dict({"exact": True, "kv_cache": {"dtype": dtype}})
    weights, keys = dict(export_hf(local)), list(te.state_dict())
    for model in (local, te, again):
        load_hf([model], weights)
        convert(model, recipe)
        cache = KVCacheInTraining(model, recipe.kv_cache.dtype)
        if cache.has_scales:
            cache.set(dict.fromkeys(scale_names(2, ["k", "v"]), 2.0**-5))
    assert list(te.state_dict()) == keys
    exact_norms = sum(isinstance(module, ExactNorm) for module in te.modules())
    assert exact_norms == (5 if qwen3 else 1)  # the others are inside linear layers

    ids = torch.randint(0, 512, (3, 300), generator=torch.Generator().manual_seed(1)).cuda()
    starts = torch.tensor([0, 300, 600, 900], dtype=torch.int32, device=DEVICE)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=300,
        max_seqlen_kv=300,
    )
    mask = torch.ones(300, 300, device=DEVICE).triu(1).bool()[None, None]
    gradients: list[dict[str, torch.Tensor]] = []
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
    for model in (local, te, again):
        hidden, logits = _scored(model, ids)
        whole.append((hidden.detach(), logits.detach()))
        logits.float().logsumexp(-1).mean().backward()
        gradients.append(dict(_gradients(model)))
        with torch.no_grad():
            assert torch.equal(_scored(model, ids, mask=mask)[0], hidden)
            assert torch.equal(_scored(model, ids[:1])[0], hidden[:1])
            assert torch.equal(_scored(model, ids[1:, :77])[0], hidden[1:, :77])
            rows = _scored(model, ids.view(1, -1), packed_seq_params=packed)[0]
            assert torch.equal(rows.view_as(hidden), hidden)
    for hidden, logits in whole[1:]:
        assert torch.equal(hidden, whole[0][0]) and torch.equal(logits, whole[0][1])
    for other in gradients[1:]:
        assert set(other) == set(gradients[0])
        for name, grad in gradients[0].items():
            assert grad.abs().sum() > 0, name
            assert relative_error(other[name].float(), grad.float()) < 1e-2, name


def _gradients(model: Any) -> Any:
    """Yield gradients by Megatron's local names."""
    for name, parameter in model.named_parameters():
        local = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        yield local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."), parameter.grad
