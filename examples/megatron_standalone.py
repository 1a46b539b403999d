"""megatron-core alone: convert a built model, train it, save and export it.

    python examples/megatron_standalone.py OUT

One process, a small Qwen3 with random weights, on a CPU if there is no GPU. The recipe is read from
FP8RL_RECIPE, if that is set. Into OUT go a checkpoint (model.pt, which loads into the model with or
without FP8), the table of what ran in which precision, and Hugging Face tensors in BF16 and in FP8.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from safetensors.torch import save_file
from transformers import Qwen3Config

from fp8rl import Recipe
from fp8rl.recipe import Pins
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf, fp8_wire
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo
from megatron_fp8rl.testing.models import build_gpt

GPU = torch.cuda.is_available()
STEPS, LENGTH, VOCAB = 4, 64, 128


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    gpt = build_gpt(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=128,
            max_position_embeddings=LENGTH,
        )
    ).to("cuda" if GPU else "cpu")
    config = gpt.config
    config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
        module=Float16Module(config, gpt),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [model],
    )

    recipe = Recipe.from_env() or Recipe(pins=Pins(layers=(-1,), kinds=("o_proj",)))
    conversion = convert(model, recipe, report=print)

    tokens = torch.arange(2 * (LENGTH + 1), device="cuda" if GPU else "cpu")
    tokens = tokens.reshape(2, LENGTH + 1) % VOCAB
    positions = torch.arange(LENGTH, device=tokens.device).expand(2, -1)
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = model(
            tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()
        )
        losses.float().mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        print(f"step {step} loss {losses.float().mean().item():.4f}")

    torch.save(gpt.state_dict(), out / "model.pt")
    save_file(dict(export_hf(model)), out / "bf16.safetensors")
    wire = fp8_wire(export_hf(model), conversion.policy, recipe.weights.scale_format)
    save_file(dict(wire), out / "fp8.safetensors")
    print(f"exported a model with {len(conversion.modules)} FP8 modules to {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/megatron_standalone.py OUT")
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
