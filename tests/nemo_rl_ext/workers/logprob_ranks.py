"""Ranks that share a vocabulary, for test_logprobs.py: each compares its part with float64."""

from __future__ import annotations

import sys

import torch

WORDS, SHAPE = 1000, (3, 7)


def main() -> None:
    from fp8rl.kernels import reference
    from nemo_rl_ext.workers.logprobs import ExactLogprob, FusedLogprob
    from support.launch import join
    from support.logprob_kernels import kernels

    rank, ranks = join()
    sys.modules["fp8rl.numerics.triton.logprobs"] = kernels()
    generator = torch.Generator().manual_seed(0)
    # 1000 more than usual, which must not cost precision.
    logits = 1000 + 4 * torch.randn(*SHAPE, WORDS, generator=generator)
    target = torch.randint(0, WORDS, SHAPE, generator=generator)
    grad = torch.randn(SHAPE, generator=generator)
    exact = logits.double().requires_grad_(True)
    expected = exact.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    expected.backward(grad.double())

    first, last = rank * WORDS // ranks, (rank + 1) * WORDS // ranks
    own = logits[..., first:last].clone().requires_grad_(True)
    group = torch.distributed.group.WORLD
    rows = logits.bfloat16()
    alone, _, _ = reference.token_logprobs(rows, target)
    shared = rows[..., first:last]
    for tokens in (4, 7, 100):  # of the sequences' 7
        given = ExactLogprob.apply(shared, target, first, last, tokens, group, True)
        assert torch.equal(given, alone)  # to the bit, whatever is gathered at once
    for kind in (FusedLogprob, ExactLogprob):
        own.grad = None
        found = kind.apply(own, target, first, last, 4, group, False)
        found.backward(grad)
        assert (found - expected).abs().max() < 1e-5
        assert own.grad is not None and exact.grad is not None
        assert (own.grad - exact.grad[..., first:last]).abs().max() < 1e-5
        with torch.no_grad():
            assert torch.equal(kind.apply(own, target, first, last, 4, group, True), found)
            nobodys = torch.tensor([[-100] * 7, [WORDS + 9] * 7, [5] * 7])
            given = kind.apply(own, nobodys, first, last, 4, group, True)
            assert (given[:2] == 0).all() and (given[2] < 0).all()  # as upstream's class has it
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the process
    sys.stdout.write("compared\n")


if __name__ == "__main__":
    main()
