"""Compile DeepGEMM's kernels while a model loads."""
