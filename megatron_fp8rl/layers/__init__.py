"""Layers that compute in FP8, or with the rollout's own kernels."""
