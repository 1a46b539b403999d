"""Megatron-Bridge with FP8 layers, by a pre-wrap hook, and its export.

    python examples/megatron_bridge.py OUT

A small Qwen3 with random weights is made by Bridge, trained for two steps and exported to OUT as
Hugging Face tensors: bf16.safetensors and fp8.safetensors. Sources that are not installed can be
named by MEGATRON_BRIDGE_SRC and MEGATRON_LM_SRC (the commit that Bridge pins); they import
TransformerEngine and triton and need Python 3.12. Without a GPU the layers are megatron's local
ones.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

for name, folder in (("MEGATRON_BRIDGE_SRC", "src"), ("MEGATRON_LM_SRC", "")):
    if name in os.environ:
        sys.path.insert(0, str(Path(os.environ[name], folder)))
os.environ.setdefault("FP8RL_RECIPE", json.dumps({"pins": {"layers": [0], "kinds": ["o_proj"]}}))

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from safetensors.torch import save_file
from transformers import Qwen3Config

from megatron_fp8rl import conversion_of
from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG, CpuShim, init_gloo

GPU = torch.cuda.is_available()
QWEN = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=128,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def main(out: Path) -> None:
    try:
        from megatron.bridge import AutoBridge
        from megatron.bridge.models.gpt_provider import local_layer_spec
    except ImportError as error:
        sys.exit(
            f"Megatron-Bridge cannot be imported ({error}); install it or set MEGATRON_BRIDGE_SRC."
        )

    from megatron_fp8rl.integrations.bridge import export_hf_weights, pre_wrap_hook

    bridge = AutoBridge.from_hf_config(QWEN)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.seq_length = 64
    if not GPU:
        provider.transformer_layer_spec = local_layer_spec
        for field, value in CPU_CONFIG.items():
            setattr(provider, field, value)

    provider.register_pre_wrap_hook(pre_wrap_hook())

    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=not GPU)
    conversion = conversion_of(model)
    train(model[0])

    for precision in ("bf16", "fp8"):
        stream = export_hf_weights(bridge, model, precision=precision, show_progress=False)
        save_file(
            {name: tensor.contiguous() for name, tensor in stream}, out / f"{precision}.safetensors"
        )
    print(f"exported a model with {len(conversion.modules)} FP8 modules to {out}")


def train(model: torch.nn.Module) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(2 * 65, device=device).reshape(2, 65) % 128
    positions = torch.arange(64, device=device).expand(2, -1)
    for step in range(2):
        loss = model(
            tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()
        )
        loss.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.float().mean().item():.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/megatron_bridge.py OUT")
    with nullcontext() if GPU else CpuShim().active():
        if GPU:
            torch.distributed.init_process_group(
                "nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1
            )
        else:
            init_gloo()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
