"""TransformerEngine's linear classes swapped for FP8 ones, in one process on one GPU.

Needs megatron-core 0.16.1 and TransformerEngine 2.12.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("transformer_engine.pytorch")
pytest.importorskip("megatron.core")

from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from fp8rl import PluginManager, Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import DeepGemmBackend, GroupedShape
from fp8rl.kv_scales import scale_name
from fp8rl.numerics import quantize_block
from fp8rl.recipe import Pins
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf
from megatron_fp8rl.hf_names import module_names
from megatron_fp8rl.integrations.megatron_lm import gpt_layer
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.layers import te_classes
from megatron_fp8rl.layers.swiglu import Fp8SwigluMLP
from support.attention import causal_attention, fake_quantized
from support.fused_swiglu import compare_with_separate
from support.launch import launch
from support.megatron import weight_codes_hf
from support.numeric import relative_error
from support.processes import environment

pytestmark = pytest.mark.usefixtures("world_of_one")

VOCAB, LENGTH, BATCH = 256, 128, 2
LATENT: dict[str, Any] = {
    "num_query_groups": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "rope",
    "rotary_scaling_factor": 1.0,
    "mscale_all_dim": 0.0,
}
"""DeepSeek-V3's attention; the down projections to latents are whole on each rank."""


def _config(experts: int | None = None, **more: Any) -> TransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 128,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": False,
    }
    if experts is not None:
        fields |= {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 256,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    kind = MLATransformerConfig if "kv_lora_rank" in more else TransformerConfig
    return kind(**{**fields, **more})


def _gpt(experts: int | None = None, spec: Any = None, **more: Any) -> GPTModel:
    config = _config(experts, **more)
    model_parallel_cuda_manual_seed(7)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec
        or get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=experts is not None,
            qk_layernorm=True,
            multi_latent_attention=config.multi_latent_attention,
        ),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()


def _convert(model: Any, **pins: Any):
    # Triton where it serves: the table's choice compiles DeepGEMM for each of these small shapes,
    # seconds each. Experts have grouped kernels in DeepGEMM only.
    name = "triton"
    if model.config.num_moe_experts is not None:
        name = "deep_gemm"
        experts = GroupedShape((128,) * 4, 512, 512)
        reason = DeepGemmBackend().supports_grouped(torch.device("cuda"), experts, "fp32")
        if reason is not None:
            pytest.skip(f"deep_gemm: {reason}")
    recipe = Recipe(pins=Pins(**pins))
    return convert(model, recipe, plugins=PluginManager(), gemm_backend=name)


def _loss(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator).cuda()
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, -1)
    labels = ids[:, 1:].contiguous()
    return model(ids[:, :-1].contiguous(), positions, None, labels=labels).float().mean()


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    _loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("experts", [None, 4], ids=["dense", "experts"])
def test_classes_parameters_and_state_stay_as_they_are(experts):
    gpt = _gpt(experts)
    names = [name for name, _ in gpt.named_parameters()]
    keys, classes = list(gpt.state_dict()), {n: type(m) for n, m in gpt.named_modules()}
    before = _loss(gpt)
    conversion = _convert(gpt, layers=(0,))
    changed = {n: type(m) for n, m in gpt.named_modules() if type(m) is not classes[n]}
    assert len(changed) == 4 and all(name.startswith("decoder.layers.1.") for name in changed)
    for name, ours in changed.items():
        assert te_classes.TE_CLASSES[classes[name]] is ours
    assert [name for name, _ in gpt.named_parameters()] == names
    assert list(gpt.state_dict()) == keys
    assert 0 < (_loss(gpt) - before).abs() < 0.05
    conversion.close()
    assert torch.equal(_loss(gpt), before)
    assert {n: type(m) for n, m in gpt.named_modules()} == classes


@pytest.mark.parametrize(
    ("experts", "fused"), [(None, True), (4, False)], ids=["dense, SwiGLU fused", "experts"]
)
def test_gradients_are_near_those_of_transformer_engine(experts, fused):
    """Tokens visit the same experts both times: one that changes them moves whole gradients.

    With the local spec on a CPU the largest error of a gradient is 0.82 where 5 to 9% of the tokens
    change, 0.14 where none does.
    """
    RouterReplay.clear_global_router_replay_instances()
    gpt = _gpt(experts, bias_activation_fusion=fused, moe_enable_routing_replay=experts is not None)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    bf16 = _gradients(gpt)
    RouterReplay.set_replay_data(RouterReplay.get_recorded_data())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    _convert(gpt)
    fp8 = _gradients(gpt)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_router_replay_instances()
    assert set(fp8) == set(bf16)
    for name, grad in fp8.items():
        assert grad.isfinite().all(), name
        # E4M3 operands in three products a layer.
        assert relative_error(grad.float(), bf16[name].float()) < 0.25, name
    assert any(not torch.equal(fp8[name], bf16[name]) for name in fp8)


@pytest.mark.parametrize(
    ("kind", "bias"), [("column", False), ("row", True), ("layernorm", False), ("layernorm", True)]
)
def test_one_layer_against_transformer_engine(kind, bias):
    """y, dx, dw and the norm's gradient within what E4M3 operands cost, bias handed out alike."""
    classes = {
        "column": te_extension.TEColumnParallelLinear,
        "row": te_extension.TERowParallelLinear,
        "layernorm": te_extension.TELayerNormColumnParallelLinear,
    }
    options = {"input_is_parallel": True} if kind == "row" else {"gather_output": False}
    layer: Any = classes[kind](
        512,
        768,
        config=_config(),
        init_method=torch.nn.init.xavier_normal_,
        bias=bias,
        skip_bias_add=bias,
        is_expert=False,
        **options,
    ).cuda()
    if bias:
        with torch.no_grad():
            layer.bias.normal_()
    x = torch.randn(LENGTH, BATCH, 512, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(LENGTH, BATCH, 768, device="cuda", dtype=torch.bfloat16)

    def run() -> list[torch.Tensor]:
        layer.zero_grad()
        inside = x.clone().requires_grad_()
        y, given = layer(inside)
        assert (given is None) is not bias
        y.backward(grad)
        found = [y.detach(), inside.grad, layer.weight.grad]
        if kind == "layernorm":
            found.append(layer.layer_norm_weight.grad)
        return [tensor.clone() for tensor in found]

    theirs = run()
    _swap_alone(layer, kind)
    for ours, expected in zip(run(), theirs, strict=True):
        assert 1e-4 < relative_error(ours.float(), expected.float()) < 0.08
    if kind == "layernorm":
        layer.return_layernorm_output = True  # as Megatron-Bridge does to give it an adapter
        with pytest.raises(UnsupportedError, match="does not serve LoRA"):
            layer(x)


def test_a_fused_mlp_gives_what_separate_operations_give(monkeypatch):
    gpt = _gpt(bias_activation_fusion=True)
    _convert(gpt)
    mlp = gpt.decoder.layers[0].mlp
    assert type(mlp) is Fp8SwigluMLP
    weights = [mlp.linear_fc1.weight, mlp.linear_fc1.layer_norm_weight, mlp.linear_fc2.weight]
    x, grad = torch.randn(2, 77, BATCH, 512, device="cuda", dtype=torch.bfloat16)
    compare_with_separate(mlp, x, grad, weights, monkeypatch)


def _swap_alone(layer: Any, kind: str) -> None:
    """Convert one layer by the same code that converts a model."""
    from fp8rl import PluginManager
    from fp8rl.training.layout import plain_layout
    from megatron_fp8rl.conversion import _setup, fp8_classes
    from megatron_fp8rl.layers.linear import change_of
    from megatron_fp8rl.layers.linear_modules import Site

    layout = plain_layout("o_proj", 768)
    site = Site(("model.layers.0.self_attn.o_proj",), kind, layer, layout)
    plugins = PluginManager()
    policy = plugins.pin_policy(Recipe().pins, module_names(_config()))
    setup = _setup(Recipe(), policy, plugins, "triton")
    _, layer.__class__, attributes = change_of(site, fp8_classes(), setup)
    layer.__dict__.update(attributes, fp8_setup=setup)


def test_multi_latent_attention():
    """Classes, gradients, HF names and codes; norms of latents are inside the up projections."""
    gpt = _gpt(**LATENT)
    classes, bf16 = {n: type(m) for n, m in gpt.named_modules()}, _gradients(gpt)
    conversion = _convert(gpt, fp8=("*.kv_b_proj",))
    changed = {n: type(m) for n, m in gpt.named_modules() if type(m) is not classes[n]}
    assert len(changed) == 2 * 7
    down = gpt.decoder.layers[0].self_attention.linear_kv_down_proj
    assert type(down) is te_classes.Fp8TELinear and len(down.weight) == 576
    fp8 = _gradients(gpt)
    assert set(fp8) == set(bf16)
    for name, grad in fp8.items():
        assert grad.isfinite().all(), name
        assert relative_error(grad.float(), bf16[name].float()) < 0.4, name
    exported = dict(export_hf(gpt))
    assert set(exported) == {f"{name}.weight" for name in module_names(gpt.config)}
    for module in conversion.modules.values():
        for name, codes in weight_codes_hf(module).items():
            expected = quantize_block(exported[f"{name}.weight"])
            assert torch.equal(codes.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(codes.scale_inv, expected.scale_inv)
    with pytest.raises(UnsupportedError, match="cache holds latents"):
        QKVObserver(gpt)


def test_a_spec_builds_transformer_engines_layers(monkeypatch):
    monkeypatch.setenv("FP8RL_RECIPE", '{"pins": {"layers": [0]}}')
    gpt = _gpt(spec=gpt_layer)
    first, second = gpt.decoder.layers
    assert type(first.mlp.linear_fc1) is te_extension.TELayerNormColumnParallelLinear
    assert type(second.mlp.linear_fc1) is te_classes.Fp8TELayerNormColumnParallelLinear
    assert torch.isfinite(_loss(gpt))


def test_attention_sees_keys_and_values_as_an_fp8_cache_holds_them():
    """Batches and packed sequences, against float64 over what the cache holds."""
    gpt = _gpt()
    observer = QKVObserver(gpt)
    with torch.no_grad():
        _loss(gpt)
    scales = {name: float(scale) for name, scale in observer.scales(1.0).items()}
    raw: dict[int, tuple] = {}
    outputs: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(gpt.decoder.layers):
        core = layer.self_attention.core_attention
        core.register_forward_pre_hook(
            lambda module, args, number=number: raw.update({number: args[:3]}), prepend=True
        )
        core.register_forward_hook(
            lambda module, args, out, number=number: outputs.update({number: out.detach()})
        )
    cache = KVCacheInTraining(gpt)
    cache.set(scales)
    _loss(gpt).backward()
    assert all(p.grad.isfinite().all() for p in gpt.parameters() if p.grad is not None)

    def held(layer: int, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        pairs = ((k, "k"), (v, "v"))
        return [fake_quantized(x, scales[scale_name(layer, role)]) for x, role in pairs]

    for number, (q, k, v) in raw.items():
        expected = causal_attention(q, *held(number, k, v))
        assert relative_error(outputs[number].float(), expected) < 6e-3
        assert relative_error(outputs[number].float(), causal_attention(q, k, v)) > 0.01

    q, k, v = (x[:, :1].detach() for x in raw[0])
    starts = torch.tensor([0, 48, LENGTH], dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=LENGTH - 48,
        max_seqlen_kv=LENGTH - 48,
    )
    core = gpt.decoder.layers[0].self_attention.core_attention
    found = core(
        *(x[:, 0].contiguous() for x in (q, k, v)),
        None,
        attn_mask_type=AttnMaskType.causal,
        packed_seq_params=packed,
    )
    k, v = held(0, k, v)
    parts = [causal_attention(q[part], k[part], v[part]) for part in (slice(48), slice(48, None))]
    expected = torch.cat(parts)[:, 0]
    assert relative_error(found.float().reshape(expected.shape), expected) < 6e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_context_parallel_attention_sees_them_too(tmp_path):
    script = Path(__file__).with_name("context_parallel_cases.py")
    launch(script, 2, [str(tmp_path)], timeout=200, env=environment())
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for result in results:
        assert result["error"] < 6e-3 < 0.01 < result["without"]
        assert result["gradients"]
        assert result["clipped"] == results[0]["clipped"] and all(result["clipped"].values())


def test_what_is_not_served_is_named():
    gpt = _gpt()
    layer = gpt.decoder.layers[1].mlp.linear_fc2
    layer.ub_overlap_rs_fprop = True
    with pytest.raises(UnsupportedError, match=r"linear_fc2' has ub_overlap_rs_fprop=True"):
        _convert(gpt)
    assert type(layer) is te_extension.TERowParallelLinear
    layer.ub_overlap_rs_fprop = False
    layer.te_quant_params = object()
    with pytest.raises(UnsupportedError, match="quant_recipe"):
        _convert(gpt)


def test_experts_without_grouped_kernels_are_refused_with_the_remedy():
    gpt = _gpt(4)
    classes = [type(module) for module in gpt.modules()]
    with pytest.raises(
        UnsupportedError, match=r"experts.*has no grouped products.*moe_grouped_gemm=False"
    ):
        convert(gpt, Recipe(), plugins=PluginManager(), gemm_backend="triton")
    assert [type(module) for module in gpt.modules()] == classes
