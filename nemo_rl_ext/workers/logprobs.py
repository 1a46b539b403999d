"""`FusedLogprob`: NeMo RL's log-probabilities of a batch in one pass over the logits.

Upstream's class goes through the logits of a chunk about eight times, in float32: to convert them,
for the maximum, the difference, the exponential, the sum and the logarithm. With 151,936 words that
is a third of what the head of a 4B model costs. This class has its signature and its results, up to
the order of float32 sums, and takes its place in the process of a worker that trains in FP8.

With ``exact`` it is `ExactLogprob`, whose forward is the function of the rollouts' sampler. That
takes two passes over the logits, one for the maximum and one for the sum, so `FusedLogprob` stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import implementation
from fp8rl.kernels.vocabulary import shared_token_logprobs
from nemo_rl_ext.names import FUSED_ENV, LOGGER
from nemo_rl_ext.patches.upstream import Upstream, resolve, served

logger = logging.getLogger(LOGGER)

UPSTREAM = Upstream(
    "nemo_rl.distributed.model_utils",
    "ChunkedDistributedLogprob.forward",
    "ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, "
    "inference_only=...",
    replaced=True,
)


class FusedLogprob(torch.autograd.Function):
    """In the place of ``nemo_rl.distributed.model_utils.ChunkedDistributedLogprob``."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: torch.distributed.ProcessGroup,
        inference_only: bool = False,
    ) -> torch.Tensor:
        """Return the log-probabilities of the targets.

        Args:
            vocab_parallel_logits: ``[B, S, V]``, this rank's part of the vocabulary.
            target: words of the whole vocabulary ``[B, S]``.
            vocab_start_index: first word of this rank's part.
            vocab_end_index: the word after its last. A target that no rank has is 0 in the result,
                as with upstream's class.
            chunk_size: upstream's; nothing is computed in chunks here.

        Returns:
            Float32 ``[B, S]``.
        """
        from fp8rl.numerics.triton.logprobs import row_sums

        target_ids = target - vocab_start_index  # a number outside the part has no logit here
        here = (target >= vocab_start_index) & (target < vocab_end_index)
        row_max, total, logit = row_sums(vocab_parallel_logits, target_ids)
        if torch.distributed.get_world_size(tp_group) > 1:
            own = row_max.clone()
            torch.distributed.all_reduce(row_max, torch.distributed.ReduceOp.MAX, tp_group)
            summed = torch.stack((total * (own - row_max).exp(), logit, here.float()))
            torch.distributed.all_reduce(summed, group=tp_group)
            total, logit, known = summed.unbind()
            here = known > 0
        logsumexp = total.log()
        if not inference_only:
            ctx.save_for_backward(vocab_parallel_logits, target_ids, row_max, logsumexp)
        return torch.where(here, (logit - row_max) - logsumexp, 0.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the logits; the other arguments have none."""
        logits, target_ids, row_max, logsumexp = ctx.saved_tensors
        kernels = implementation(logits, "logprobs")
        gradient = kernels.logprob_gradient(logits, target_ids, row_max, logsumexp, grad_outputs[0])
        return gradient, None, None, None, None, None, None


class ExactLogprob(FusedLogprob):
    """As :class:`FusedLogprob`, with the bits of the rollouts' log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: torch.distributed.ProcessGroup,
        inference_only: bool = False,
    ) -> torch.Tensor:
        """Return the log-probabilities of the targets; see :meth:`FusedLogprob.forward`.

        Ranks that share the vocabulary gather the logits of ``chunk_size`` tokens at a time. The
        gradient is of this rank's part, which alone is kept.
        """
        logits = vocab_parallel_logits
        found, row_max, logsumexp = shared_token_logprobs(logits, target, tp_group, chunk_size)
        if not inference_only:
            ctx.save_for_backward(logits, target - vocab_start_index, row_max, logsumexp)
        return found


def fuse_logprobs(policy: Mapping[str, Any], *, exact: bool = False) -> None:
    """Let upstream's functions of this process compute chunked log-probabilities with our class.

    They look the class up by its name, and there is no key for another one. Where upstream's class
    takes other arguments, it stays, and the log says so: only the speed is another one.

    Raises:
        UnsupportedError: with ``exact``, or with :data:`FUSED_ENV` 1, upstream's class would stay.
    """
    wanted = "exact" if exact else os.environ.get(FUSED_ENV)
    if wanted == "0":
        return
    if policy.get("logprob_chunk_size") is None:
        if wanted == "1":
            raise UnsupportedError(
                f"{FUSED_ENV}=1 has no effect where log-probabilities are not computed in chunks; "
                "set policy.logprob_chunk_size and policy.megatron_cfg.defer_fp32_logits, or "
                "remove it from policy.megatron_cfg.env_vars."
            )
        return
    from nemo_rl.distributed import model_utils

    try:
        resolve(model_utils, UPSTREAM)
    except UnsupportedError as error:
        remedies = {
            "1": f"remove {FUSED_ENV} from policy.megatron_cfg.env_vars",
            "exact": "set exact to false in the fp8rl block",
        }
        if wanted in remedies:
            raise UnsupportedError(f"{error} {served()}, or {remedies[wanted]}.") from None
        logger.warning("fp8rl: upstream's class computes log-probabilities. %s", error)
        return
    model_utils.ChunkedDistributedLogprob = ExactLogprob if exact else FusedLogprob
    logger.info(
        "fp8rl: log-probabilities %s.",
        "are computed as the rollouts' are" if exact else "take one pass over the logits",
    )
