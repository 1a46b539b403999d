"""What runs in NeMo RL's workers."""
