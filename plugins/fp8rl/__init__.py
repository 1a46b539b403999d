"""fp8rl: FP8 reinforcement learning of LLMs, as plugins of the engines you already run."""

from fp8rl.models.pins import PinPolicy
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.hookspecs import hookimpl
from fp8rl.plugins.manager import PluginManager
from fp8rl.recipe import Recipe

__all__ = ["ModelSpec", "PinPolicy", "PluginManager", "Recipe", "hookimpl"]
__version__ = "0.1.0"
