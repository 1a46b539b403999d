"""nemo-toolkit 2.x (the LLM collection of NeMo 2.0) with FP8 layers, by its config's layer spec.

    python examples/megatron_nemo.py OUT

NeMo asks its config for a layer spec with the arguments that Megatron-Bridge uses, so the same spec
serves. `layer_spec` is a function of a module, because NeMo writes the config into its checkpoints
by name; the recipe comes from FP8RL_RECIPE. Here a small Qwen3 with random weights is built,
trained for two steps without a trainer and exported to OUT as Hugging Face tensors. In a run of
NeMo's own, give the config to `llm.Qwen3Model(config)` and that to `llm.pretrain` or
`llm.finetune`; `fp8` of NeMo's precision plugin stays None.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

if "NEMO_TOOLKIT_SRC" in os.environ:
    sys.path.insert(0, os.environ["NEMO_TOOLKIT_SRC"])
os.environ.setdefault("FP8RL_RECIPE", json.dumps({"pins": {"layers": [0], "kinds": ["o_proj"]}}))

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from safetensors.torch import save_file

from megatron_fp8rl import conversion_of
from megatron_fp8rl.export import export_hf
from megatron_fp8rl.integrations.megatron_lm import layer_spec
from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG, CpuShim, init_gloo

GPU = torch.cuda.is_available()


def main(out: Path) -> None:
    try:
        from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config
    except ImportError as error:
        sys.exit(f"nemo-toolkit cannot be imported ({error}); install it or set NEMO_TOOLKIT_SRC.")

    out.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(
        num_layers=3,
        hidden_size=256,
        ffn_hidden_size=512,
        num_attention_heads=2,
        num_query_groups=1,
        vocab_size=128,
        seq_length=64,
        bf16=True,
        params_dtype=torch.bfloat16,
        transformer_layer_spec=layer_spec,
        **({} if GPU else {"transformer_impl": "local", **CPU_CONFIG}),
    )
    model = config.configure_model(tokenizer=None).to("cuda" if GPU else "cpu", torch.bfloat16)
    conversion = conversion_of(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(2 * 65, device=next(model.parameters()).device).reshape(2, 65) % 128
    positions = torch.arange(64, device=tokens.device).expand(2, -1)
    for step in range(2):
        loss = model(
            tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()
        )
        loss.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.float().mean().item():.4f}")
    save_file({n: t.contiguous() for n, t in export_hf(model)}, out / "bf16.safetensors")
    print(f"exported a model with {len(conversion.modules)} FP8 modules to {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/megatron_nemo.py OUT")
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
