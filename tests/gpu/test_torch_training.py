"""FP8 training of models of transformers on a GPU, against the reference on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support.hf import ALIGNED, RAGGED, convert_alone, hf_model, ids
from support.numeric import relative_error
from torch_fp8rl.kv import KVCacheInTraining, QKVObserver

GPU = torch.device("cuda")


def backward(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and the gradients of linears and experts, on the CPU."""
    tokens = ids().to(model.device)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    found = {n: p.grad.cpu() for n, p in model.named_parameters() if "_proj" in n}
    model.zero_grad()
    return loss.detach().cpu(), found


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("qwen2", ALIGNED), ("qwen3", RAGGED), ("qwen3_moe", ALIGNED)],
    ids=["biases", "half groups", "experts"],
)
def test_codes_losses_and_gradients_are_those_of_the_reference(
    kind: str, shape: dict[str, int]
) -> None:
    models = [hf_model(kind, shape), hf_model(kind, shape).to(GPU)]
    here, there = (convert_alone(model) for model in models)
    expected = here.weight_codes()
    for name, (codes, scale_inv) in there.weight_codes().items():
        assert torch.equal(codes.cpu().view(torch.uint8), expected[name].codes.view(torch.uint8))
        assert torch.equal(scale_inv.cpu(), expected[name].scale_inv), name
    (loss, grads), (of_gpu, found) = map(backward, models)
    assert abs(loss - of_gpu) < 0.01
    for name, grad in grads.items():
        # Another rounding of an activation is another code, and of a router another expert.
        assert relative_error(found[name], grad) < (0.5 if kind == "qwen3_moe" else 0.2), name
    with there.keeping_codes():
        for _ in range(2):  # the second time with codes of the first
            again, kept = backward(models[1])
            assert abs(again - of_gpu) < 0.01
            assert all(relative_error(kept[name], found[name]) < 0.2 for name in found)


def test_kv_scales_and_a_rounded_cache() -> None:
    models = [hf_model(shape=RAGGED).eval(), hf_model(shape=RAGGED).eval().to(GPU)]
    logits, tables = [], []
    for model in models:
        observer, cache = QKVObserver(model), KVCacheInTraining(model)
        with torch.no_grad():
            model(ids().to(model.device))
            tables.append(observer.amax().cpu())
            cache.set({name: scale / 4 for name, scale in observer.scales(1.0).items()})
            logits.append(model(ids().to(model.device)).logits.cpu())
        assert cache.metrics()["k_clipped_share"] > 0
    assert torch.allclose(*tables, rtol=0.02)
    assert relative_error(logits[1], logits[0]) < 0.03
