"""Kernels that rollout and trainer both call where the recipe says ``exact``.

The result for a token has the same bits whatever is computed beside it, and in both engines.
Triton alone; an engine is never imported.
"""
