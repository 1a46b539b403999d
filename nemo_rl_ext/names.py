"""Names that the modules of this package share."""

LOGGER = "nemo_rl.fp8rl"
"""A child of NeMo RL's own logger, whose level (``NRL_LOG_LEVEL``) lets INFO through."""
