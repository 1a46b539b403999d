"""A norm, or SiLU and multiply, fused with the quantization after it."""
