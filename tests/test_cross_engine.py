"""Trainer and rollout, real ones in two gloo processes, hold equal codes, scales and pins."""

from __future__ import annotations

import json
import textwrap
import uuid
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fp8rl import PinPolicy, Recipe
from fp8rl.errors import PinError
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf, fp8_wire
from megatron_fp8rl.hf_names import module_names as trainer_names
from megatron_fp8rl.testing.models import build_gpt, transformer_config
from support.megatron import one_process, weight_codes_hf
from support.numeric import same_codes
from support.processes import run_ranks
from torch_fp8rl import convert as convert_torch
from vllm_fp8rl.storage.experts import MATRICES, ExpertGrids, ExpertLayout, empty_stacks, stack_of

SCRIPT = Path(__file__).with_name("cross_engine_cases.py")
# With head size 128 and width 512 each HF tensor has blocks of its own, at TP=2 too. With 64 and
# 328, k begins within a block of q, up within one of gate, and rows and columns have ragged ends.
ALIGNED, RAGGED = {"head_dim": 128, "width": 512}, {"head_dim": 64, "width": 328}


def case(tp: int, weights: str, activations: str, shape: dict[str, int], **more: object) -> dict:
    return {"tp": tp, "weights": weights, "activations": activations, **shape, **more}


CASES = {
    "tp1-fp32": case(1, "fp32", "pow2", RAGGED),
    "tp1-pow2": case(1, "pow2", "fp32", ALIGNED),
    "tp2-pow2-codes": case(2, "pow2", "pow2", ALIGNED, wire="fp8"),
    # 64 rows of k and v, on each rank.
    "tp1-fp32-ragged-codes": case(1, "fp32", "fp32", RAGGED, kv_heads=1, wire="fp8"),
    "tp2-fp32-ragged-codes": case(2, "fp32", "pow2", RAGGED, wire="fp8"),
    "tp2-pow2-latent-codes": case(2, "pow2", "pow2", ALIGNED, latent=True, wire="fp8"),
}
PLUGIN = """
    from fp8rl import hookimpl
    from fp8rl.recipe import Pins

    @hookimpl
    def register_pins(module_names):
        return Pins(names=("model.layers.2.self_attn.o_proj",))
"""
FP8_MODULES = [
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.2.mlp.down_proj",
    "model.layers.2.mlp.gate_up_proj",
    "model.layers.2.self_attn.qkv_proj",
]


def fp8_modules(name: str) -> list[str]:
    """What both engines have in FP8, in one case."""
    if not CASES[name].get("latent"):
        return FP8_MODULES
    found = [m for m in FP8_MODULES if not m.endswith("qkv_proj")]
    attention = [f"model.layers.{layer}.self_attn" for layer in (1, 2)]
    return sorted([*found, *(f"{a}.{leaf}_proj" for a in attention for leaf in ("kv_b", "q"))])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    plugins = tmp_path_factory.mktemp("plugins")
    info = plugins / "pinner-1.0.dist-info"
    info.mkdir()
    (plugins / "pinner.py").write_text(textwrap.dedent(PLUGIN))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pinner\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp8rl]\npinner = pinner\n")
    out = tmp_path_factory.mktemp("cross-engine")
    # vLLM's CPU worker would set the last one; here there is no worker. It names shared memory,
    # which outlives a run that is killed.
    name = uuid.uuid4().hex
    arguments = out, json.dumps(CASES)
    run_ranks(SCRIPT, 2, *arguments, timeout=240, folders=(plugins,), VLLM_DIST_IDENT=name)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_codes_and_scales_are_equal(ranks: list[dict], name: str):
    """The trainer's export, tensor by tensor in a strange order, in the rollout's live weights."""
    for rank in ranks:
        assert rank[name]["error"] is None  # each name, shape and KV scale was known and complete
        for module, (compared, wrong) in rank[name]["differing"].items():
            assert compared > 0 and wrong == 0, f"{module}: {wrong} of {compared} differ"
        assert rank[name]["scales_differ"] == []
        assert rank[name]["wrong_products"] == []  # both multiply in the recipe's formats


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("tp2-pow2-codes", set()),
        ("tp1-fp32-ragged-codes", {"k_proj", "v_proj", "gate_proj", "up_proj"}),
        ("tp2-fp32-ragged-codes", {"k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_codes_travel_where_the_rollout_can_take_them(
    ranks: list[dict], name: str, leaves: set[str]
):
    """The rest of the weights travels as it is, and the codes come out equal
    (:func:`test_codes_and_scales_are_equal`): a Hugging Face tensor that shares blocks with others
    in the rollout's ``[q; k; v]`` has no codes of its own there."""
    for rank in ranks:
        assert {n.split(".")[-2] for n in rank[name]["without_codes"]} == leaves


@each_case
def test_the_same_modules_are_pinned(ranks: list[dict], name: str):
    """By the recipe and by a plugin, on both sides."""
    for rank in ranks:
        assert rank[name]["trainer"] == fp8_modules(name)
        assert rank[name]["rollout"] == fp8_modules(name)


@each_case
def test_the_resolved_tables_are_equal(ranks: list[dict], name: str):
    for rank in ranks:
        trainer, rollout = rank[name]["tables"]
        assert trainer == rollout
        assert ["model.layers.0.mlp.up_proj", "bf16", "first: 1"] in trainer
        assert ["model.layers.1.mlp.up_proj", "fp8", ""] in trainer


@pytest.mark.parametrize("name", ["tp1-fp32", "tp1-pow2", "tp1-fp32-ragged-codes"])
def test_torch_holds_the_same(ranks: list[dict], name: str):
    """Codes and scales are the rollout's, although transformers has q, k and v apart."""
    for rank in ranks:
        found = rank[name]["torch"]
        assert found["error"] is None  # the rollout took its tensors, and holds what it held
        assert found["wrong"] == [] and found["scales"] == []
        assert found["modules"] == fp8_modules(name)
        assert found["table"] == rank[name]["tables"][0]


def test_ignore_rules_of_a_router_do_not_catch_gate_proj():
    """One list of names, matched in one way, over one vocabulary on both sides."""
    config = {"num_experts": 2, "mlp_only_layers": [1], "norm_topk_prob": True}
    hf_config = Qwen3MoeConfig(num_hidden_layers=3, **config)
    every_second = Qwen3MoeConfig(num_hidden_layers=4, decoder_sparse_step=2, **config)
    with one_process() as shim, shim.active():
        vocabularies = (trainer_names(transformer_config(hf_config)), ModelSpec.of(hf_config).names)
        names = trainer_names(transformer_config(every_second))
    assert names == ModelSpec.of(every_second).names and "model.layers.3.mlp.gate" in names
    gate_proj = "model.layers.1.mlp.gate_proj"
    for names in vocabularies:
        policy = PinPolicy(Pins(names=("*.mlp.gate",)), names)
        assert policy.precision(gate_proj) == "fp8" and policy.bf16_linears() == []
        assert policy.precision("model.layers.0.mlp.gate") == "bf16"
        # Whoever writes so wide a name as to catch a part of gate_up is told.
        with pytest.raises(PinError, match=r"gate_proj' but not all parts of the fused"):
            PinPolicy(Pins(names=("*.mlp.gate*",)), names)
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("width", [128, 192])
def test_experts_of_any_width_have_equal_codes(width):
    """What both trainers multiply with, and what the rollout's expert stacks hold after an export,
    whether BF16 or codes travel."""
    hf_config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=32,
        moe_intermediate_size=width,
        num_experts=2,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    prefix = "model.layers.0.mlp.experts"
    layout = ExpertLayout(prefix, {0: 0, 1: 1}, 2, 128, width, -(-width // 128) * 128, 0, 1)
    with one_process() as shim, shim.active():
        gpt = build_gpt(hf_config)
        conversion = convert(gpt, Recipe())
        trainer = {
            name: codes
            for module in conversion.modules.values()
            for name, codes in weight_codes_hf(module).items()
        }
        sent = dict(export_hf(gpt))
        streams = [sent, dict(fp8_wire(export_hf(gpt), conversion.policy))]
    for stream in streams:
        stacks = empty_stacks(layout)
        grids = ExpertGrids(layout, stacks.__getitem__, "fp32", torch.device("cpu"), lambda: None)
        for expert, slot in product(range(2), MATRICES):
            name = layout.hf_name(expert, slot)
            grids.load(expert, slot, stream[name])
            if f"{name}_scale_inv" in stream:
                grids.load_scales(expert, slot, stream[f"{name}_scale_inv"])
            held, stack = trainer[name.removesuffix(".weight")], stack_of(slot)
            rows = layout.part_of(stacks[stack], slot)[expert][:, : held.codes.shape[1]]
            scales = layout.part_of(stacks[f"{stack}_scale_inv"], slot, 128)[expert]
            assert same_codes((rows, scales), held), name
        assert grids.complete
    hf = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    experts = hf.model.layers[0].mlp.experts
    for expert in range(2):
        parts = (sent[f"{prefix}.{expert}.{leaf}_proj.weight"] for leaf in ("gate", "up", "down"))
        gate, up, down = parts
        experts.gate_up_proj.data[expert] = torch.cat([gate, up])
        experts.down_proj.data[expert] = down
    found = convert_torch(hf, Recipe()).weight_codes()
    names = [name for name in trainer if name.startswith(prefix)]
    assert len(names) == 6
    for name in names:
        same = (
            a.view(torch.uint8).equal(b.view(torch.uint8))
            for a, b in zip(found[name], trainer[name], strict=True)
        )
        assert all(same), name
