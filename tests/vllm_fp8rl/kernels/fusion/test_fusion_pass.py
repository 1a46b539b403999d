"""What the fusion pass makes of the operations of ``exact``; their bits need a Hopper GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from fp8rl import Recipe
from support.tiny import make_checkpoint

fusion_pass = pytest.importorskip("vllm_fp8rl.kernels.fusion.fusion_pass", reason="needs Triton")

OPS = torch.ops.fp8rl


def fused(function: Any, *shapes: tuple[int, ...], folder: Any) -> list[tuple[Any, ...]]:
    """List fp8rl's operations that are left of a function of BF16 tensors, with what is given."""
    engine = EngineArgs(str(make_checkpoint(folder, 0)), skip_tokenizer_init=True)
    recipe: Any = SimpleNamespace(exact=True, activations=Recipe().activations)
    with set_current_vllm_config(config := engine.create_engine_config()), FakeTensorMode():
        one_pass = fusion_pass.FuseQuantization(config, recipe)
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        graph = make_fx(function)(*inputs)
        view_to_reshape(graph)
        one_pass(graph.graph)
    graph.graph.eliminate_dead_code()
    return [
        (str(node.target).split(".")[1], *(str(x) for x in node.args if not made(x)))
        for node in graph.graph.nodes
        if str(node.target).startswith("fp8rl.")
    ]


def made(argument: Any) -> bool:
    """Whether an operation's argument was computed, and is neither a number nor an input."""
    return isinstance(argument, torch.fx.Node) and argument.op != "placeholder"


def test_norms_of_exact_are_fused_with_quantization(tmp_path):
    def layers(x: Any, residual: Any, first: Any, second: Any) -> Any:
        start = OPS.quantize(OPS.exact_norm(x, first, 1e-5), False)
        normed, total = OPS.exact_add_norm(x, residual, first, 1e-5)
        codes = OPS.quantize(normed, False)
        normed, total = OPS.exact_add_norm(codes[0].to(x.dtype), total, second, 1e-6)
        return start, codes, OPS.quantize(normed, False), OPS.exact_norm(total, second, 1e-6)

    found = fused(layers, (7, 256), (7, 256), (256,), (256,), folder=tmp_path)
    assert found == [
        ("rms_norm_quantize", "x_1", "first_1", "1e-05", "False"),
        ("add_rms_norm_quantize", "x_1", "residual_1", "first_1", "1e-05", "False"),
        ("add_rms_norm_quantize", "second_1", "1e-06", "False"),
        ("exact_norm", "second_1", "1e-06"),
    ]


def test_norms_of_queries_and_keys_are_fused_with_their_rotation(tmp_path):
    def normed(x: Any, weight: Any) -> Any:
        by_head = x.view(*x.shape[:-1], x.shape[-1] // 64, 64)
        return OPS.exact_norm(by_head, weight, 1e-6).view(x.shape)

    def attention(qkv: Any, query_weight: Any, key_weight: Any, table: Any) -> Any:
        query, key, value = qkv.split([256, 128, 128], -1)
        positions = torch.zeros(len(qkv), dtype=torch.int64)
        query, key = normed(query, query_weight), normed(key, key_weight)
        return *OPS.exact_rotate(query, key, positions, table.float()), value

    found = fused(attention, (7, 512), (64,), (64,), (99, 64), folder=tmp_path)
    assert found == [("exact_norm_rotate", "query_weight_1", "key_weight_1", "1e-06")]


def test_swiglu_of_exact_is_fused_with_quantization(tmp_path):
    def mlp(x: Any) -> Any:
        return OPS.quantize(OPS.exact_swiglu(x), False)

    def of_other_scales(x: Any) -> Any:
        return OPS.quantize(OPS.exact_swiglu(x), True)

    assert fused(mlp, (7, 256), folder=tmp_path) == [("silu_mul_quantize", "x_1", "False")]
    apart = fused(of_other_scales, (7, 256), folder=tmp_path)
    assert apart == [("exact_swiglu", "x_1"), ("quantize", "True")]


def test_exact_leaves_the_sums_over_ranks_alone(monkeypatch):
    monkeypatch.setattr(fusion_pass.FuseQuantization, "__init__", lambda *_: None)
    for exact in (True, False):
        over_ranks = SimpleNamespace(fuse_allreduce_rms=True, enable_sp=None)
        compilation = SimpleNamespace(
            mode=3, backend="inductor", inductor_compile_config={}, pass_config=over_ranks
        )
        recipe: Any = Recipe.from_dict({"exact": exact})
        fusion_pass.install(SimpleNamespace(compilation_config=compilation), recipe)
        assert over_ranks.fuse_allreduce_rms is not exact  # it has a norm of its own
