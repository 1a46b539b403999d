"""The ``fp8rl`` keys of a NeMo RL config: read, merged with upstream's keys, checked."""
