"""What ``fp8rl doctor``, ``fp8rl export --check`` and ``fp8rl exact`` run of vLLM."""
