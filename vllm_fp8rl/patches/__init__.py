"""Patches of vLLM. :mod:`vllm_fp8rl.patches.ledger` lists them all.

A patch is the last resort: first a public door, then a subclass, then a patch.
"""
