"""One rank of test_megatron_te.py's context-parallel attention, run by ``launch``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType

from fp8rl.kv_scales import scale_name
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.testing.models import build_gpt
from support.attention import causal_attention, fake_quantized
from support.launch import join
from support.megatron import dense
from support.numeric import relative_error

LENGTH, BATCH, HEADS, GROUPS, SIZE = 256, 2, 4, 2, 128
SCALES = {"k": 0.0061, "v": 0.0047}  # both clip a few values


def main(out: Path) -> None:
    """Attend over a rank's share of the sequence; write how far it is from float64."""
    rank, world = join("cuda")
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    config = dense(hidden_size=512, num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    model = build_gpt(
        config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True),
        context_parallel_size=world,
        transformer_impl="transformer_engine",
        use_cpu_initialization=False,
    ).cuda()
    cache = KVCacheInTraining(model)
    layers = range(config.num_hidden_layers)
    cache.set({scale_name(n, role): scale for n in layers for role, scale in SCALES.items()})
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(LENGTH, BATCH, heads, SIZE, generator=generator).bfloat16().cuda()
        for heads in (HEADS, GROUPS, GROUPS)
    )

    def share(x: torch.Tensor) -> torch.Tensor:
        """A chunk of each half, so that causal masks cost every rank the same."""
        chunks = x.chunk(2 * world)
        return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))

    core = model.decoder.layers[0].self_attention.core_attention
    mine = [share(x).requires_grad_() for x in (q, k, v)]
    found = core(*mine, None, attn_mask_type=AttnMaskType.causal)
    found.float().sum().backward()
    held = fake_quantized(k, SCALES["k"]), fake_quantized(v, SCALES["v"])
    result = {
        "error": relative_error(found.float(), share(causal_attention(q, *held))),
        "without": relative_error(found.float(), share(causal_attention(q, k, v))),
        "gradients": all(bool(x.grad.isfinite().all() and x.grad.any()) for x in mine[1:]),
        "clipped": cache.metrics(),
    }
    torch.save(result, out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
