"""Rotation and SwiGLU that round as in the trainer."""
