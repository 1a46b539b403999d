"""Kernels that multiply with the live FP8 weights, and the operations fused with them."""
