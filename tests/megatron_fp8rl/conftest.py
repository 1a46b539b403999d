"""One gloo process with megatron's parallel state, and small models to put in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG, CpuShim, init_gloo

SEED = 1234


@contextmanager
def _parallel_state(**sizes: int) -> Iterator[CpuShim]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    shim = CpuShim()
    ours = not torch.distributed.is_initialized()
    with shim.active():
        init_gloo()
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(SEED)
    try:
        yield shim
    finally:
        parallel_state.destroy_model_parallel()
        if ours:
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def megatron_world() -> Iterator[CpuShim]:
    """World size 1 with megatron's parallel state, for the tests of one module."""
    with _parallel_state() as shim:
        yield shim


@pytest.fixture
def mcore(megatron_world: CpuShim) -> Iterator[None]:
    """The test runs inside an open CPU region, from one seed."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with megatron_world.active():
        model_parallel_cuda_manual_seed(SEED)
        yield


@pytest.fixture
def build_gpt(mcore: None):
    """Factory of a small dense GPT in BF16; keyword arguments override the config's fields."""
    return _build_gpt


def _build_gpt(*, vocab: int = 64, length: int = 64, tied: bool = False, **overrides: Any):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages = {k: overrides.pop(k) for k in ("vp_stage",) if k in overrides}
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "kv_channels": 64,
        "ffn_hidden_size": 256,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        **CPU_CONFIG,
        **overrides,
    }
    config = TransformerConfig(**fields)
    spec = get_gpt_layer_local_spec(
        normalization=config.normalization, qk_layernorm=config.qk_layernorm
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        **stages,
    )
