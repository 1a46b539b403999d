"""How evenly the tokens of a random mixture of experts are shared out: a look at ``real_model.py``.

    python benchmarks/real_model.py FOLDER --size 30b-a3b-12l
    python benchmarks/real_routes.py FOLDER [--tokens 2048] [--ep 4] [--out FILE]

Random tokens go through the model in transformers, on a CPU or a GPU. For each layer it prints the
tokens of the busiest expert and of the busiest of ``--ep`` GPUs over the mean, and the share of the
experts that no token visits. GPUs that share the experts of a layer wait for the busiest one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch


def expert_loads(folder: Path, tokens: int, length: int = 512) -> list[torch.Tensor]:
    """Return, for each layer with experts, the tokens of each of them.

    Args:
        folder: of the model, whose router takes the largest logits of all experts (Qwen3).
        tokens: how many random tokens, in sequences of ``length``.
        length: of a sequence.

    Raises:
        ValueError: the model has no such routers.
    """
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    config, loads = model.config, []

    def count(module: Any, given: tuple[torch.Tensor, ...], _: Any) -> None:
        hidden = given[0].reshape(-1, config.hidden_size)[:tokens]
        logits = torch.nn.functional.linear(hidden.float(), module.weight.float())
        chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices
        loads.append(torch.bincount(chosen.flatten(), minlength=config.num_experts).cpu())

    routers = [each for name, each in model.named_modules() if name.endswith("mlp.gate")]
    if not routers or not hasattr(config, "num_experts"):
        raise ValueError(f"the model in {folder} has no routers of Qwen3's kind")
    for router in routers:
        router.register_forward_hook(count)
    generator = torch.Generator().manual_seed(0)
    size = -(-tokens // length), length
    ids = torch.randint(0, config.vocab_size, size, generator=generator)
    with torch.inference_mode():
        model.model(ids.to(device))
    return loads


def balance(load: torch.Tensor, gpus: int) -> dict[str, float]:
    """Return how unequal the load of a layer's experts is, and that of GPUs that share them."""
    load = load.float()
    of_gpu = torch.stack([part.sum() for part in load.tensor_split(gpus)])
    return {
        "busiest expert over mean": round((load.max() / load.mean()).item(), 2),
        "busiest GPU over mean": round((of_gpu.max() / of_gpu.mean()).item(), 2),
        "share of experts without tokens": round((load == 0).float().mean().item(), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens of the experts of a random model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ep", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    layers = [balance(load, options.ep) for load in expert_loads(options.folder, options.tokens)]
    for layer in layers:
        sys.stdout.write(json.dumps(layer) + "\n")
    if options.out is not None:
        found = {"tokens": options.tokens, "ep": options.ep, "layers": layers}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
