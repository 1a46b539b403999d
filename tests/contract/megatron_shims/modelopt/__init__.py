"""Stands for nvidia-modelopt, which Megatron-Bridge imports; no test quantizes with it."""

from any_name import stand_in as __getattr__
from any_package import has_any_module

has_any_module(__name__)

__all__ = ["__getattr__"]
