"""Megatron-LM with FP8 layers through `--spec`, on GPUs or on a CPU.

On GPUs nothing of this file is needed, it is Megatron-LM's own command line:

    FP8RL_RECIPE=recipe.yaml torchrun --nproc-per-node 8 pretrain_gpt.py \\
        --spec megatron_fp8rl.integrations.megatron_lm gpt_layer \\
        --transformer-impl transformer_engine ...

Here a model of such arguments is built by Megatron-LM's own parser and builder and trained for a
few steps in one process on a CPU, which needs its source, triton, and for the commit that
Megatron-Bridge pins Python 3.12; more arguments may follow:

    MEGATRON_LM_SRC=path/to/Megatron-LM python examples/megatron_lm.py --save OUT --save-interval 4
"""

import json
import os
import sys
from pathlib import Path

SOURCE = os.environ.get("MEGATRON_LM_SRC", "")
if not Path(SOURCE, "gpt_builders.py").is_file():
    sys.exit(
        "usage: MEGATRON_LM_SRC=path/to/Megatron-LM python examples/megatron_lm.py [ARGUMENT ...]\n"
        "The path needs Megatron-LM's gpt_builders.py."
    )
sys.path.insert(0, SOURCE)
os.environ.setdefault("FP8RL_RECIPE", json.dumps({"pins": {"layers": [0], "kinds": ["o_proj"]}}))

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fp8rl import conversion_of
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo

ARGUMENTS = """
    --spec megatron_fp8rl.integrations.megatron_lm gpt_layer --transformer-impl local
    --num-layers 3 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 2
    --group-query-attention --num-query-groups 1 --kv-channels 128 --qk-layernorm --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 2
    --train-iters 4 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 127 --bf16 --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --use-cpu-initialization
"""


def train() -> None:
    from gpt_builders import gpt_builder
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_args

    args = parse_args()
    validate_args(args)
    args.padded_vocab_size = 128
    set_args(args)
    model = gpt_builder(args, pre_process=True, post_process=True).bfloat16()
    conversion = conversion_of(model)
    print(f"{len(conversion.modules)} modules in FP8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tokens = torch.arange(2 * 65).reshape(2, 65) % 127
    positions = torch.arange(64).expand(2, -1)
    for step in range(args.train_iters):
        losses = model(
            tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()
        )
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {losses.float().mean().item():.4f}")


if __name__ == "__main__":
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("RANK", "0")
    sys.argv[1:] = ARGUMENTS.split() + sys.argv[1:]
    with CpuShim().active():
        init_gloo()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        train()
