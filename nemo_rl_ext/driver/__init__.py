"""What runs in the process of NeMo RL's driver."""
