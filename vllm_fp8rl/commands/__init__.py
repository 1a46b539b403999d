"""What ``fp8rl doctor`` and ``fp8rl exact`` run of vLLM."""
