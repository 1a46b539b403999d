"""Corrected GRPO on plain tensors: nothing here knows NeMo RL."""
