"""The worker of a rank: check tensors and write them into the live model."""
