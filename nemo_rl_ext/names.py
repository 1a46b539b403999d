"""Names that the modules of this package share."""

LOGGER = "nemo_rl.fp8rl"
"""A child of NeMo RL's own logger, whose level (``NRL_LOG_LEVEL``) lets INFO through."""

FUSED_ENV = "FP8RL_FUSED_LOGPROBS"
"""Set in ``policy.megatron_cfg.env_vars``: 0 leaves NeMo RL's log-probabilities, 1 refuses to start
where they would be left for another reason (:mod:`nemo_rl_ext.workers.logprobs`)."""
