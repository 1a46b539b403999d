"""Export and load against Hugging Face transformers, which knows nothing of Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fp8rl import PinPolicy
from fp8rl.errors import CheckpointError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import quantize_block
from fp8rl.recipe import Pins
from megatron_fp8rl.export import export_hf, fp8_wire, load_hf
from megatron_fp8rl.testing.models import build_gpt
from support.numeric import same_codes

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3-head64-tied": Qwen3Config(**(SMALL | {"tie_word_embeddings": True}), head_dim=64),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "llama": LlamaConfig(
        **SMALL, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ),
    "llama-3.1-frequencies": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-one-kv-head": LlamaConfig(**(SMALL | {"num_key_value_heads": 1})),
    "llama-all-biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "qwen2-qkv-bias": Qwen2Config(**(SMALL | {"num_key_value_heads": 4})),
}


def hf_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32):
    """A model whose norms and biases are not the ones and zeros that would hide a mix-up."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:
                    param.normal_(1.0, 0.2)
    return model.eval()


def hf_tensors(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return dict(checkpoint_tensors(hf_model(config, dtype)))


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As in a checkpoint: one matrix for each expert, and no tied head."""
    for name, param in model.named_parameters():
        prefix, _, stacked = name.partition(".mlp.experts.")
        for number, matrix in enumerate(param.detach() if stacked else ()):
            expert = f"{prefix}.mlp.experts.{number}"
            if stacked == "gate_up_proj":
                gate, up = matrix.chunk(2)
                yield from ((f"{expert}.gate_proj.weight", gate), (f"{expert}.up_proj.weight", up))
            else:
                yield f"{expert}.{stacked}.weight", matrix
        if not stacked:
            yield name, param.detach()


def tokens(batch: int = 2, length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, SMALL["vocab_size"], (batch, length), generator=generator)
    return ids, torch.arange(length).expand(batch, -1)


def assert_same(stream, expected: dict[str, torch.Tensor]) -> None:
    pairs = list(stream)
    assert sorted(name for name, _ in pairs) == sorted(expected)
    for name, tensor in pairs:
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_and_tensors_come_back(mcore, name):
    config = CONFIGS[name]
    reference = hf_model(config)
    model = build_gpt(config, dtype=torch.float32).eval()
    tensors = dict(checkpoint_tensors(reference))
    load_hf(model, tensors.items())  # an iterable of pairs
    ids, positions = tokens()
    with torch.no_grad():
        ours = model(ids, positions, None)
        theirs = reference(ids).logits
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 1e-5, f"relative error {error:.2e}"
    assert_same(export_hf(model), tensors)


def test_stream_is_in_layer_order_and_copies_each_parameter_in_its_turn(mcore):
    """A stream that copied the model ahead would need twice its memory."""
    model = build_gpt(CONFIGS["qwen3-head64-tied"])
    live = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stream = export_hf(model)
    pairs = [next(stream)]
    with torch.no_grad():
        for param in model.decoder.layers[1].parameters():
            param.fill_(7.0)
    pairs += stream
    names = [name for name, _ in pairs]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "model.norm.weight"  # tied: no lm_head
    assert names[1:12] == [n.replace("layers.1.", "layers.0.") for n in names[12:23]]
    assert all((tensor == 7).all() for name, tensor in pairs if ".layers.1." in name)
    assert not live & {tensor.untyped_storage().data_ptr() for _, tensor in pairs}


NAME = "model.layers.1.self_attn.k_proj.weight"
BAD = {
    "missing.*layers.1.self_attn.k_proj": lambda t: {n: x for n, x in t.items() if n != NAME},
    "unknown.*layers.2": lambda t: t | {"model.layers.2.mlp.up_proj.weight": t[NAME]},
    "k_proj.weight' is given twice": lambda t: [*t.items(), (NAME, t[NAME])],
    "k_proj.weight' is torch.float32": lambda t: t | {NAME: t[NAME].float()},
    "unquantized": lambda t: t | {NAME: t[NAME].to(torch.float8_e4m3fn)},
    "lm_head.weight' differs": lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_changes_nothing(mcore, message):
    config = CONFIGS["qwen3-head64-tied"]
    model = build_gpt(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        load_hf(model, BAD[message](hf_tensors(config, torch.bfloat16)))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_head_beside_a_tied_one_and_other_dtypes_are_accepted(mcore):
    config = CONFIGS["qwen3-head64-tied"]
    model = build_gpt(config)
    tensors = hf_tensors(config, torch.bfloat16)
    load_hf(model, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    load_hf(model, hf_tensors(config, torch.float32), allow_cast=True)
    assert_same(export_hf(model), tensors)


def _all_heads_norm(model: Any) -> None:
    """MiniMax-M2's, in a model that otherwise looks like Qwen3-MoE."""
    norm = model.decoder.layers[0].self_attention.k_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach().repeat(2))


def _adapter(model: Any) -> None:
    model.decoder.layers[1].mlp.register_module("adapter", torch.nn.Linear(2, 2))


def _config(**fields: Any) -> Any:
    return lambda model: vars(model.config).update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_config(normalization="LayerNorm"), "input_layernorm' has LayerNorm"),
        (_config(rotary_interleaved=True), "interleaved rotary"),
        (_all_heads_norm, r"k_layernorm\.weight' has .* as MiniMax-M2's"),
        (_adapter, r"'decoder\.layers\.1\.mlp\.adapter'"),
    ],
)
def test_unsupported_models_are_named_at_the_call(mcore, change, message):
    model = build_gpt(CONFIGS["qwen3-moe" if change is _all_heads_norm else "llama"])
    change(model)
    with pytest.raises(UnsupportedError, match=message):
        export_hf(model)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("sliding_window", 8, "sliding_window is 8"),
        ("layer_types", ["sliding_attention"] * 2, "layer_types is .'sliding_attention'"),
        ("attention_bias", True, "attention_bias and mlp_bias differ"),
        ("rope_parameters", {"rope_type": "yarn"}, r"rope_parameters\.rope_type is 'yarn'"),
        (
            "rope_parameters",
            {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 2},
            r"rope_parameters\.low_freq_factor is 2, .*; set it to 1,",
        ),
    ],
)
def test_builder_refuses_what_it_cannot_express(mcore, key, value, message):
    config = LlamaConfig(**SMALL)
    setattr(config, key, value)
    with pytest.raises(UnsupportedError, match=message):
        build_gpt(config)


# ---- codes on the wire


@pytest.mark.parametrize(
    ("shape", "ranks", "without"),
    [  # query heads, key and value heads, head size, width
        ((4, 2, 128, 512), 2, set()),
        ((4, 1, 64, 512), 1, {"k_proj", "v_proj"}),
        ((3, 3, 64, 328), 1, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ((4, 4, 128, 768), 4, {"gate_proj", "up_proj", "down_proj"}),  # 192 a rank
        ((2, 2, 64, 512), 2, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_fp8_wire_sends_codes_where_no_rank_and_no_fused_matrix_cuts_a_block(
    shape, ranks, without, caplog
):
    """That the rollout takes them as they are: ``tests/test_cross_engine.py``."""
    heads, kv_heads, size, width = shape
    matrices = {
        "self_attn.q_proj": (heads * size, 256),
        "self_attn.k_proj": (kv_heads * size, 256),
        "self_attn.v_proj": (kv_heads * size, 256),
        "self_attn.o_proj": (256, heads * size),
        "mlp.gate_proj": (width, 256),
        "mlp.up_proj": (width, 256),
        "mlp.down_proj": (256, width),
    }
    stream = {f"model.layers.0.{n}.weight": torch.randn(d) for n, d in matrices.items()}
    policy = PinPolicy(Pins(), ModelSpec.dense(1).names)
    with caplog.at_level("WARNING", logger="megatron_fp8rl"):
        wire = dict(fp8_wire(stream, policy, tensor_parallel_size=ranks))
    for name, weight in stream.items():
        if name.split(".")[-2] in without:
            assert torch.equal(wire[name], weight) and f"{name}_scale_inv" not in wire
        else:
            assert same_codes((wire[name], wire[f"{name}_scale_inv"]), quantize_block(weight))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (1 if without else 0)
    assert all(f".{leaf} (1)" in told[0] for leaf in without)


@pytest.mark.parametrize(
    ("width", "ranks", "codes"), [(768, 2, True), (768, 4, False), (192, 1, True)]
)
def test_experts_travel_as_codes_where_no_rank_cuts_a_block(width, ranks, codes):
    """An expert's matrices have a grid each in the rollout (768 rows over 4 ranks are 192)."""
    moe = {"model_type": "qwen3_moe", "num_experts": 1, "num_hidden_layers": 1}
    policy = PinPolicy(Pins(), ModelSpec.of(moe).names)
    shapes = {"gate": (width, 128), "up": (width, 128), "down": (128, width)}
    stream = {
        f"model.layers.0.mlp.experts.0.{n}_proj.weight": torch.randn(shapes[n]) for n in shapes
    }
    wire = dict(fp8_wire(stream, policy, tensor_parallel_size=ranks))
    assert {wire[name].dtype == torch.float8_e4m3fn for name in stream} == {codes}
