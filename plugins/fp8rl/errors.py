"""Every error that fp8rl raises on purpose; all share one base class."""

from __future__ import annotations


class Fp8RLError(Exception):
    """Base class. The message is one sentence that names the key or tensor and the remedy."""


class RecipeError(Fp8RLError, ValueError):
    """A recipe that cannot be read or that contradicts itself."""


class PinError(Fp8RLError, ValueError):
    """A pin that matches nothing, splits a fused module, or asks about an unknown module."""


class OptionError(Fp8RLError, ValueError):
    """A command-line option that cannot be used, or not with the others."""


class ModelError(Fp8RLError, ValueError):
    """A model's folder or config that cannot be read, has numbers of no model, or is quantized."""


class ScaleError(Fp8RLError, ValueError):
    """A quantization or KV-cache scale that is missing, zero, negative, NaN or infinite."""


class RefitError(Fp8RLError, RuntimeError):
    """A refit that is partial, duplicated, wrongly shaped or carries NaN."""


class UnsupportedError(Fp8RLError, NotImplementedError):
    """A shape, layer, engine version or GPU that the plugin does not serve."""


class PluginError(Fp8RLError, RuntimeError):
    """A third-party plugin that cannot be loaded or that breaks the contract."""


class CheckpointError(Fp8RLError, RuntimeError):
    """A checkpoint that is missing, torn, or written by another version of the format."""


class BatchError(Fp8RLError, ValueError):
    """A training batch of wrong shape, or with a NaN logprob, reward or advantage that counts."""


def sentence(error: BaseException, longest: int = 240) -> str:
    """Return the first ``longest`` characters of an error in one line, with its kind."""
    text = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return text if len(text) <= longest else text[:longest] + " .."
