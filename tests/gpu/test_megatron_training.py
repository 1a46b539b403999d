"""Megatron-Core in FP8 on one GPU, local layers: training, offload, kept codes, observers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("megatron.core")

from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.layers.linear_modules import weights_of
from megatron_fp8rl.testing.models import build_gpt
from nemo_rl_ext.workers.training import kept_codes_of
from support.megatron import Trainer, losses

pytestmark = pytest.mark.usefixtures("world_of_one")

VOCAB, LENGTH, BATCH = 512, 256, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "dense": Qwen3Config(**SIZES),
    "experts": Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
}
each_model = pytest.mark.parametrize("kind", CONFIGS)


def _gpt(kind: str = "dense", seed: int = 0, **more: Any):
    return build_gpt(CONFIGS[kind], seed=seed, **more).cuda()


def _tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (BATCH, LENGTH + 1), generator=generator)
    return (steps.cumsum(1) % VOCAB).cuda()


def _loss(model: torch.nn.Module, seed: int = 3) -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, device="cuda")
    return losses(model, _tokens(seed), loss_mask=mask).float().mean()


class Run(Trainer):
    """With the distributed optimizer; in FP8 unless ``fp8`` is off."""

    def __init__(self, kind: str = "dense", *, fp8: bool = True, seed: int = 0, **options: Any):
        super().__init__(
            _gpt(kind, seed),
            fp8={"gemm_backend": "triton", **options} if fp8 else None,
            distributed=True,
            lr=1e-3,
            grad_reduce_in_fp32=True,
        )

    def step(self, seed: int) -> tuple[float, float]:
        loss, norm = super().step(_tokens(seed))
        assert norm > 0
        return loss, norm


@each_model
def test_losses_stay_with_bf16(kind):
    bf16, fp8 = Run(kind, fp8=False), Run(kind)
    curves = [(bf16.step(i)[0], fp8.step(i)[0]) for i in range(12)]
    assert curves[-1][0] < 0.8 * curves[0][0]
    for plain, ours in curves:
        assert ours == pytest.approx(plain, rel=0.05)
    assert any(plain != ours for plain, ours in curves)


def test_buffers_offloaded_by_megatron_and_changed_meanwhile():
    """DDP's own offload gives parameters their address and version back; old codes would fit."""
    run, other = Run(), Run(seed=5)
    expected = _loss(other.ddp)
    with run.conversion.keeping_codes():
        run.step(0)
        before = _loss(run.ddp)
        run.ddp.eval()
        for mine, theirs in zip(run.ddp.buffers, other.ddp.buffers, strict=True):
            mine.offload_to_cpu(move_params=True, move_grads=True)
            mine.param_data_cpu.copy_(theirs.param_data)
            mine.reload_from_cpu()
        run.ddp.train()
        torch.cuda.synchronize()
        found = _loss(run.ddp)
    assert torch.equal(found, expected) and not torch.equal(found, before)


@each_model
def test_a_call_that_keeps_codes_takes_what_was_counted_and_frees_it(kind):
    """What :class:`KeptCodes` decides by, on a device: two bytes of each weight in FP8."""
    run = Run(kind)
    weights = sum(w.numel() for m in run.conversion.modules.values() for w in weights_of(m))
    kept_codes, held = kept_codes_of(run.conversion), []
    with torch.no_grad():
        expected = _loss(run.ddp)
    for seed in range(3):

        def train(seed: int = seed) -> int:
            run.gradients(_tokens(seed))
            return torch.cuda.memory_allocated()

        inside = kept_codes.during("train", train, tokens=LENGTH, backward=True)
        held.append(inside - torch.cuda.memory_allocated())
    assert held[0] == 0
    assert held[1:] == pytest.approx([2 * weights] * 2, rel=0.02)
    for _ in range(2):
        found: list[torch.Tensor] = []

        def logprobs(found: list[torch.Tensor] = found) -> int:
            with torch.no_grad():
                found += [_loss(run.ddp) for _ in range(2)]
            return torch.cuda.memory_allocated()

        inside = kept_codes.during("get_logprobs", logprobs, tokens=LENGTH, backward=False)
        assert all(torch.equal(each, expected) for each in found)
    assert inside - torch.cuda.memory_allocated() == pytest.approx(weights, rel=0.02)


def test_observers_do_not_synchronise():
    gpt = _gpt()
    observer = QKVObserver(gpt)
    q = torch.randn(LENGTH, BATCH, 4, 128, device="cuda", dtype=torch.bfloat16)
    observer._hook(0)(None, (q, q * 2, q * 4))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        observer._hook(1)(None, (q, q * 2, q * 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    table = observer.amax()
    assert torch.equal(table[0], table[1])
    assert table[0, 0] == q.abs().max()
