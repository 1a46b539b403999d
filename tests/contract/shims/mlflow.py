"""Stands for mlflow, which NeMo RL's logger imports at the top; no test logs through it."""

from any_name import stand_in as __getattr__

__all__ = ["__getattr__"]
