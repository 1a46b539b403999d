"""Products of activations with the live FP8 weight of a linear layer."""
