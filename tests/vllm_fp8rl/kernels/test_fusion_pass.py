"""What the fusion pass makes of the operations of ``exact``; their bits need a Hopper GPU."""

from __future__ import annotations

from collections import Counter
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
from vllm_fp8rl.testing.tiny import make_checkpoint

fusion_pass = pytest.importorskip("vllm_fp8rl.kernels.fusion_pass", reason="needs Triton")

OPS = torch.ops.fp8rl


def fused(function: Any, *shapes: tuple[int, ...], folder: Any) -> Counter[str]:
    """Count fp8rl's operations that are left of a function of BF16 tensors."""
    engine = EngineArgs(str(make_checkpoint(folder, 0)), skip_tokenizer_init=True)
    recipe: Any = SimpleNamespace(exact=True, activations=Recipe().activations)
    with set_current_vllm_config(config := engine.create_engine_config()), FakeTensorMode():
        one_pass = fusion_pass.FuseQuantization(config, recipe)
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        graph = make_fx(function)(*inputs)
        view_to_reshape(graph)
        one_pass(graph.graph)
    graph.graph.eliminate_dead_code()
    names = (str(node.target) for node in graph.graph.nodes)
    return Counter(name.split(".")[1] for name in names if name.startswith("fp8rl."))


def test_norms_of_exact_are_fused_with_quantization(tmp_path):
    def layers(x: Any, residual: Any, first: Any, second: Any) -> Any:
        start = OPS.quantize(OPS.exact_norm(x, first, 1e-5), False)
        normed, total = OPS.exact_add_norm(x, residual, first, 1e-5)
        codes = OPS.quantize(normed, False)
        normed, total = OPS.exact_add_norm(codes[0].to(x.dtype), total, second, 1e-6)
        return start, codes, OPS.quantize(normed, False), OPS.exact_norm(total, second, 1e-6)

    found = fused(layers, (7, 256), (7, 256), (256,), (256,), folder=tmp_path)
    assert found == {"rms_norm_quantize": 1, "add_rms_norm_quantize": 2, "exact_norm": 1}


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
    assert found == {"exact_norm_rotate": 1}
