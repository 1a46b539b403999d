"""What test_cross_engine.py compares: one weight in all engines, in the same two processes.

Run as a script (see ``launch``) with OUT and the cases as JSON: for each case a real Megatron-Core
GPT is converted, exported and observed, and what it exports goes into a real vLLM Qwen3 of the same
tensor-parallel size, and into a model of transformers that torch trains. Each rank writes what it
saw to ``OUT/<rank>.json``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config

from fp8rl import PinPolicy, Recipe
from fp8rl.errors import Fp8RLError
from fp8rl.gemm import ReferenceBackend
from fp8rl.kv_scales import parse_scale_name, scale_names
from fp8rl.numerics import Quantized, quantize_group
from megatron_fp8rl import Conversion, convert
from megatron_fp8rl.export import export_hf, fp8_wire
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.testing.cpu_shim import CpuShim
from megatron_fp8rl.testing.models import build_gpt
from support.engine import register_model
from support.launch import join
from support.megatron import weight_codes_hf
from support.mla import ON_A_CPU
from torch_fp8rl import convert as convert_torch
from torch_fp8rl import export_hf as export_torch
from torch_fp8rl.kv import QKVObserver as QKVObserverOfTorch

LAYERS, LENGTH = 3, 16
PINS: dict[str, Any] = {"first": 1, "names": ["model.layers.1.mlp.down_proj"]}
"""The recipe's; a plugin on the path pins ``model.layers.2.self_attn.o_proj`` besides."""


@dataclass(frozen=True)
class Case:
    tp: int
    weights: str
    activations: str
    head_dim: int
    width: int
    kv_heads: int = 2
    wire: str = "bf16"
    """``fp8``: codes and scales travel instead of the weights."""
    latent: bool = False
    """Moonlight's attention, without experts; its cache has no scales."""

    @property
    def pins(self) -> dict[str, Any]:
        # Megatron's local layers split the rows to the latents over ranks, the rollout does not.
        latent = {"fp8": ["*.kv_b_proj"], "kinds": ["a_proj"]}
        return PINS | latent if self.latent else PINS


def hf_config(case: Case) -> Qwen3Config | DeepseekV3Config:
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 256,
        "intermediate_size": case.width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if not case.latent:
        head = case.head_dim
        return Qwen3Config(**shape, head_dim=head, architectures=["Qwen3ForCausalLM"])
    return DeepseekV3Config(
        **shape | {"num_key_value_heads": 4, "tie_word_embeddings": False},
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=case.head_dim,
        qk_rope_head_dim=64,
        v_head_dim=case.head_dim,
        first_k_dense_replace=LAYERS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        architectures=["DeepseekV3ForCausalLM"],
    )


def vllm_model(
    case: Case, recipe: Recipe, folder: Path, rank: int
) -> tuple[torch.nn.Module, PinPolicy]:
    """The module tree of a vLLM engine on this rank of ``case.tp``, and the pins it resolved."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as groups
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from vllm_fp8rl import engine_args

    register_model(folder)
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=case.tp,
        **(ON_A_CPU if case.latent else {}),
        **engine_args(recipe),
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        if not groups.model_parallel_is_initialized():
            groups.init_distributed_environment(2, rank, local_rank=rank, backend="gloo")
            groups.initialize_model_parallel(case.tp, backend="gloo")
        model = initialize_model(config)
    return model, config.quant_config.resolve().policy


def observed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """KV scales of the model over a few tokens."""
    observer = QKVObserver([model])
    tokens = torch.arange(LENGTH).unsqueeze(0)
    with torch.no_grad():
        model(tokens, tokens, None)
    return observer.scales(margin=1.05)


def fused(found: Mapping[str, Quantized]) -> Quantized:
    """A trainer's codes as one matrix of this rank: q, k and v, or gate and up, together."""
    pieces = list(found.values())
    codes = torch.cat([piece.codes.view(torch.uint8) for piece in pieces])
    return Quantized(codes, torch.cat([piece.scale_inv for piece in pieces]))


def differing(conversion: Conversion, model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Per FP8 module of the trainer: codes and scales compared, and how many are not equal."""
    return {
        name: different(model.get_submodule(name), fused(weight_codes_hf(module)))
        for name, module in conversion.modules.items()
    }


def different(live: Any, held: Quantized) -> tuple[int, int]:
    codes, scales = live.weight.view(torch.uint8), live.weight_scale_inv
    assert codes.shape == held.codes.shape and scales.shape == held.scale_inv.shape
    wrong = (codes != held.codes).sum() + (scales != held.scale_inv).sum()
    return codes.numel() + scales.numel(), int(wrong)


def wrong_products(case: Case, conversion: Conversion, model: torch.nn.Module) -> list[str]:
    """Modules whose product of one input is not, to the bit, that of the recipe's formats."""
    torch.manual_seed(7)
    other = "fp32" if case.activations == "pow2" else "pow2"
    wrong = []
    for name, module in conversion.modules.items():
        layer: Any = model.get_submodule(name)
        linear: Any = module
        x = torch.randn(5, layer.weight.shape[1])
        rollout = layer.quant_method.apply(layer, x)
        trainer = linear.fp8_state.codes.layout.to_hf(linear._forward_impl(x, linear.weight), -1)
        weight = Quantized(layer.weight.data, layer.weight_scale_inv.data)
        recipe, another = (
            ReferenceBackend().fprop(quantize_group(x, scale_format=f), weight, torch.float32)
            for f in (case.activations, other)
        )
        if not (torch.equal(rollout, recipe) and torch.equal(trainer, recipe)):
            wrong.append(name)
        assert not torch.equal(recipe, another), "this input does not tell the formats apart"
    return wrong


def in_torch(
    case: Case,
    recipe: Recipe,
    conversion: Conversion,
    engine: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    scales: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """What differs in a model of transformers that torch trains: pins, KV scales, and codes from
    the rollout's after a refit with its tensors."""
    model = AutoModelForCausalLM.from_config(hf_config(case))
    model.load_state_dict(weights, strict=False)
    other = convert_torch(model, recipe)
    error = refit(engine, dict(export_torch(model)) | dict(scales))
    observer = QKVObserverOfTorch(model)
    with torch.no_grad():
        model(torch.arange(LENGTH).unsqueeze(0))
    observer.close()
    found = observer.scales(margin=1.05)
    counts = {
        name: different(engine.get_submodule(name), fused(module.codes_by_name()))[1]
        for name, module in other.modules.items()
    }
    return {
        "error": error,
        "scales": [name for name, scale in scales.items() if found[name] != scale],
        "modules": sorted(other.modules),
        "table": [(row.name, row.precision, row.reason) for row in other.policy.report()],
        "wrong": [name for name, count in counts.items() if count],
    }


def refit(
    engine: torch.nn.Module, tensors: dict[str, torch.Tensor], *, scaled: bool = True
) -> str | None:
    """Send tensors one by one; the error, if there is one."""
    from vllm_fp8rl.refit import RefitSession

    try:
        with RefitSession(engine, expect_kv_scales=scaled) as session:
            for name, tensor in tensors.items():
                session.load([(name, tensor)])
    except Fp8RLError as raised:
        return f"{type(raised).__name__}: {raised}"
    return None


def run(case: Case, out: Path, rank: int) -> dict[str, Any]:
    from vllm.distributed import parallel_state as groups

    from vllm_fp8rl.kv.scales import kv_scale_state

    recipe = Recipe.from_dict(
        {
            "pins": case.pins,
            "kv_cache": {"dtype": "auto" if case.latent else "fp8_e4m3"},
            "weights": {"scale_format": case.weights},
            "activations": {"scale_format": case.activations},
        }
    )
    folder = out / f"{case.head_dim}-{case.width}-{case.kv_heads}-{case.latent}-{rank}"
    hf_config(case).save_pretrained(folder)
    shim = CpuShim()
    with shim.active():
        parallel_state.initialize_model_parallel(case.tp)
        model_parallel_cuda_manual_seed(1)
        trainer = build_gpt(hf_config(case), dtype=torch.float32, seed=3)
        for parameter in trainer.parameters():  # what torch rounds masters to
            parameter.data.copy_(parameter.data.bfloat16())
        conversion = convert(trainer, recipe)
        scales = {} if case.latent else observed(trainer)
    engine, policy = vllm_model(case, recipe, folder, rank)
    with shim.active():
        stream = export_hf(trainer)
        if case.wire == "fp8":
            stream = fp8_wire(stream, conversion.policy, case.weights, tensor_parallel_size=case.tp)
        tensors = dict(stream)
        plain = dict(export_hf(trainer))
    tensors = {name: tensors[name] for name in sorted(tensors, key=lambda name: name[::-1])}
    sent = [] if case.latent else scale_names(LAYERS, ("k", "v"))
    tensors |= {name: scales[name] for name in sent}
    error = refit(engine, tensors, scaled=bool(sent))
    with shim.active():
        result: dict[str, Any] = {
            "error": error,
            "differing": differing(conversion, engine),
            "wrong_products": wrong_products(case, conversion, engine),
            "without_codes": sorted(
                name
                for name, tensor in tensors.items()
                if name.endswith("_proj.weight")
                and conversion.policy.precision(name[: -len(".weight")]) == "fp8"
                and tensor.dtype == torch.float32
            ),
            "tables": [
                [(row.name, row.precision, row.reason) for row in each.report()]
                for each in (conversion.policy, policy)
            ],
            "trainer": sorted(conversion.modules),
            "rollout": sorted(
                name
                for name, module in engine.named_modules()
                if hasattr(module, "weight_scale_inv")
            ),
            "scales_differ": [
                name
                for name, (layer, role) in ((n, parse_scale_name(n)) for n in sent)
                if kv_scale_state(engine)[layer, role] != float(scales[name])
            ],
        }
    if case.tp == 1 and not case.latent:
        with shim.active():
            result["torch"] = in_torch(
                case, recipe, conversion, engine, plain, {name: scales[name] for name in sent}
            )
    conversion.close()
    groups.destroy_model_parallel()
    parallel_state.destroy_model_parallel()
    gc.collect()
    return result


def main(out: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    rank, _ = join()
    results = {}
    for name, fields in cases.items():
        sys.stderr.write(f"{name}\n")  # a hang is told with the last line
        sys.stderr.flush()
        results[name] = run(Case(**fields), out, rank)
    (out / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
