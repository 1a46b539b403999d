"""Patches of vLLM: each says why it is there, how it works, and when it can go."""
