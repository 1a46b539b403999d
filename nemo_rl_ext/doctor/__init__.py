"""``fp8rl doctor nemo-rl``: what a config will do, without Ray, a GPU or an import of NeMo RL."""
