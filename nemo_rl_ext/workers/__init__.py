"""Subclasses of NeMo RL's workers, and the mixins they are made of."""
