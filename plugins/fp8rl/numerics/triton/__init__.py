"""Triton kernels, one file for each kernel family; they equal the reference bit for bit."""
