"""vLLM's fused MoE kernels over live weights, and the settings that they read."""
