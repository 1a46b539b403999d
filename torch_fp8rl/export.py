"""Hugging Face tensors out of a model that torch trains, for the rollout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fp8rl.errors import UnsupportedError
from torch_fp8rl.layers import gathered
from torch_fp8rl.modules import global_name


def export_hf(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model by Hugging Face name in bfloat16, as a refit takes them.

    Under FSDP2 each tensor is gathered when it is asked for: all processes must go through all of
    them. A tied output layer comes once, as the embedding; experts come as the model holds them.

    Args:
        model: a model of transformers, or what wraps it, converted or not.

    Raises:
        UnsupportedError: the model has LoRA adapters, without which its weights are not the model.
    """
    parameters = {global_name(path): parameter for path, parameter in model.named_parameters()}
    if found := next((name for name in parameters if ".lora_" in name), None):
        raise UnsupportedError(
            f"'{found}' is an adapter; merge it into the weights first (merge_adapter of PEFT, and "
            "unload), or send it to the engine as a LoRA adapter."
        )
    yield from (
        (name, gathered(parameter).to(torch.bfloat16)) for name, parameter in parameters.items()
    )
