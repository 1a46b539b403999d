"""nemo-toolkit's LLM collection takes the Megatron plugin's layer spec.

Its package imports far more than a test can have, so its own functions are taken out of the source
and run on the installed megatron-core.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fp8rl import conversion_of
from megatron_fp8rl.integrations.megatron_lm import layer_spec
from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG
from support.megatron import one_process
from support.sources import source

TAKEN = [
    "GPTConfig",
    "default_layer_spec",
    "local_layer_spec",
    "mtp_block_spec",
    "transformer_engine_layer_spec",
]


def base_py() -> Path:
    root = source("NEMO_TOOLKIT_SRC")
    file = root / "nemo/collections/llm/gpt/model/base.py"
    if not file.is_file():
        pytest.skip(
            f"{root} has no LLM collection (nemo-toolkit 3.0 builds no megatron-core models)"
        )
    return file


@pytest.fixture
def nemo() -> dict[str, Any]:
    """NeMo's ``GPTConfig`` and what its method ``configure_model`` calls."""
    names: dict[str, Any] = {
        "partial": functools.partial,
        "dataclass": dataclasses.dataclass,
        "contextlib": contextlib,
        "inspect": inspect,
        "torch": torch,
        "logging": logging,
        "io": SimpleNamespace(IOMixin=object),
        "Any": Any,
        "Callable": Callable,
        "Literal": Literal,
        "Optional": Optional,
        "Union": Union,
        "TransformerConfig": TransformerConfig,
        "ModuleSpec": ModuleSpec,
        "MCoreGPTModel": GPTModel,
        "MCoreDotProductAttention": DotProductAttention,
        "AttnBackend": AttnBackend,
        "HAVE_TE": False,
        "_grad_accum_fusion_available": False,
        "gpt_forward_step": None,
        "gpt_data_step": None,
        "GenerationConfig": object,
    }
    tree = ast.parse(base_py().read_text(encoding="utf-8"))
    taken: list[Any] = [n for n in tree.body if getattr(n, "name", None) in TAKEN]
    assert sorted(n.name for n in taken) == TAKEN
    exec(compile(ast.Module(taken, []), str(base_py()), "exec"), names)
    return names


def test_its_config_builds_quantized(nemo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_RECIPE", '{"pins": {"layers": [0]}}')
    with one_process() as shim, shim.active():
        config = nemo["GPTConfig"](
            num_layers=2,
            hidden_size=128,
            ffn_hidden_size=256,
            num_attention_heads=1,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            position_embedding_type="rope",
            vocab_size=128,
            seq_length=32,
            bf16=True,
            params_dtype=torch.bfloat16,
            transformer_layer_spec=layer_spec,
            **CPU_CONFIG,
        )
        model = config.configure_model(tokenizer=None).to(torch.bfloat16)
        assert sorted(conversion_of(model).modules) == [
            f"model.layers.1.{name}"
            for name in ("mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj")
        ] + ["model.layers.1.self_attn.qkv_proj"]
        tokens = torch.arange(64).reshape(2, 32)
        positions = torch.arange(32).expand(2, -1)
        loss = model(tokens, positions, None, labels=tokens)
        loss.float().mean().backward()
        assert torch.isfinite(loss).all()
