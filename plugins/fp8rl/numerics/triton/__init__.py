"""Triton kernels, equal to :mod:`fp8rl.numerics.reference` bit for bit."""
