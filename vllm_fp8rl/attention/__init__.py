"""Attention backends over an FP8 KV cache."""
