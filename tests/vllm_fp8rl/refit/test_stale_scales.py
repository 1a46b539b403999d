"""KV scales that are old, or 1.0 by default, without a word: vLLM's own way, and ours."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

from fp8rl.errors import ScaleError
from support.engine import KV_SCALE, Engine
from vllm_fp8rl.calibration import set_uncalibrated_kv_scales
from vllm_fp8rl.kv.scales import forget_kv_scales
from vllm_fp8rl.refit import drop_requests

PREFIX = "model.layers.0.self_attn"
FIRST, SECOND = 0.25, 0.5


def stock_layer() -> Any:
    """An attention layer as vLLM's own method finds it."""
    layer = torch.nn.Module()
    layer.kv_cache_dtype = "fp8_e4m3"
    layer.calculate_kv_scales = False  # read up to vLLM 0.27
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        layer.register_buffer(name, torch.tensor(1.0))
    layer._k_scale_cpu, layer._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)
    return layer


def load(layer: Any, scale: float) -> bool:
    """As vLLM's models load a checkpoint's K and V scales; whether any was taken."""
    taken = False
    parameters = {f"{PREFIX}.attn.{name}": p for name, p in layer.named_parameters()}
    for role in ("k", "v"):
        name = maybe_remap_kv_scale_name(f"{PREFIX}.{role}_scale", parameters)
        if name is not None:
            parameters[name].weight_loader(parameters[name], torch.tensor([scale]))
            taken = True
    return taken


def test_vllms_method_drops_a_second_scale_and_starts_from_1() -> None:
    method = BaseKVCacheMethod(None)  # type: ignore[arg-type]
    layer = stock_layer()
    method.create_weights(layer)
    assert load(layer, FIRST)
    method.process_weights_after_loading(layer)
    assert layer._k_scale.item() == FIRST
    assert not load(layer, SECOND)
    method.process_weights_after_loading(layer)
    assert layer._k_scale.item() == FIRST, (
        "vLLM takes a second scale now: see docs/measurements/reliability.md"
    )
    without = stock_layer()
    method.create_weights(without)
    method.process_weights_after_loading(without)
    assert without._k_scale.item() == 1.0


def test_here_a_second_scale_counts_and_none_is_a_refusal(engine: Engine) -> None:
    attention = engine.model.get_submodule(f"{PREFIX}.attn")
    try:
        for scale in (FIRST, SECOND):
            engine.model.load_weights([(f"{PREFIX}.k_scale", torch.tensor([scale]))])
            assert attention._k_scale.item() == attention._k_scale_float == scale
        engine.llm.reset_prefix_cache()  # an earlier test may have filled it
        forget_kv_scales(engine.model)
        engine.refuses(ScaleError, "does not start from scale 1")
    finally:
        drop_requests(engine.llm)
        set_uncalibrated_kv_scales(engine.model, KV_SCALE)
        engine.llm.reset_prefix_cache()
