"""Qwen3 models in their true shapes with random weights: what ``nemo_rl.py --task real`` runs.

    python benchmarks/real_model.py FOLDER [--size 1.7b|4b|8b|30b-a3b-12l] [--layers 8]
                                    [--experts 32] [--plain] [--heavy-tails]

Norms are 1 and matrices are normal with a standard deviation of 0.02, as before a pretraining. So
activations are of order 1 in every layer, FP8 codes take every size, and a GPU draws the power that
it draws with trained weights (``rollout.py`` says what near-zero weights do). The logits of a token
have a standard deviation of about 1: a policy with nearly the largest entropy, which goes on until
it is stopped. ``30b-a3b-12l`` has the first 12 of the 48 layers of Qwen3-30B-A3B, with all experts.

Experts need more (:func:`deviation`): what attention adds is nearly the same for all tokens,
because random queries attend to all positions alike. With 0.02 everywhere the tokens of a layer
soon differ little, and a quarter of the experts get none of them (``real_routes.py``); ``--plain``
draws such weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiny_models import CHAT

from fp8rl.models.families import FUSED
from fp8rl.models.spec import ModelSpec

SIZES = {
    "1.7b": ("qwen3_1.7b", None),
    "4b": ("qwen3_4b", None),
    "8b": ("qwen3_8b", None),
    "30b-a3b-12l": ("qwen3_30b_a3b", 12),
}
"""The file in ``shapes`` of each size, and its layers where they are fewer than the file's."""
INDEX = "model.safetensors.index.json"
"""Written last: a folder that has it is complete."""
SHARD_BYTES = 2 << 30
STD = 0.02
"""Standard deviation of the matrices of dense models."""
ANSWERS = "AB"
ANSWER_EVERY = 64
"""Of so many words, one is each answer: a response of hundreds of random words has one."""


def shape_of(size: str) -> dict[str, Any]:
    """Return the ``config.json`` of a size."""
    name, layers = SIZES[size]
    file = Path(__file__).with_name("shapes") / f"{name}.json"
    shape: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return shape if layers is None else shape | {"num_hidden_layers": layers}


def has_shape(folder: Path, size: str) -> bool:
    """Tell whether a folder has the ``config.json`` of a size."""
    file = folder / "config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")) == shape_of(size)


def words(shape: Mapping[str, Any]) -> list[str]:
    """Return the text of every token id.

    NeMo RL's verifier of multiple choice takes the first "Answer: X" of a response. Here every 64th
    word says A, and every 64th B, so half of the answers of a random policy are right. Without
    rewards that differ all advantages would be 0, and a backward over zeros draws little power.
    """
    made = [f"w{i}" for i in range(shape["vocab_size"])]
    for offset, answer in enumerate(ANSWERS):
        for i in range(offset, len(made), ANSWER_EVERY):
            made[i] = f"Answer:{answer}{i}"
    made[shape["bos_token_id"]], made[shape["eos_token_id"]] = "<|endoftext|>", "<|im_end|>"
    made[-1] = "<unk>"
    return made


def prompt_words(shape: Mapping[str, Any]) -> list[str]:
    """Return the words of which prompts are made: all but answers and special tokens."""
    return [word for word in words(shape) if word.startswith("w")]


def make_model(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write the config and a tokenizer.

    Args:
        folder: to write.
        shape: a ``config.json`` of a Qwen3, e.g. that of :func:`shape_of`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2), encoding="utf-8")
    make_tokenizer(shape).save_pretrained(folder)
    return folder


def make_weights(
    folder: Path, seed: int = 0, *, plain: bool = False, heavy_tails: bool = False
) -> None:
    """Write the weights in BF16 safetensors, unless the folder has them already.

    Args:
        folder: with a config; 8B and 30b-a3b-12l take 16 GB.
        seed: of the weights.
        plain: every matrix has :data:`STD`, with experts too.
        heavy_tails: matrices follow Student's distribution with 3 degrees of freedom, and norms
            have weights of many sizes, so that some numbers are far larger than the rest.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / INDEX).is_file():
        return
    config = AutoConfig.from_pretrained(folder)
    spec = ModelSpec.of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        shapes |= of_checkpoint(name, tuple(parameter.shape))
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def weight(name: str) -> torch.Tensor:
        made = torch.empty(shapes[name], dtype=torch.bfloat16, device=device)
        if made.ndim == 1:
            made.fill_(1.0)
            return (made.log_normal_(0, 1, generator=generator) if heavy_tails else made).cpu()
        made.normal_(0, STD if plain else deviation(name, spec), generator=generator)
        if heavy_tails:
            squares = sum(
                torch.empty_like(made).normal_(0, 1, generator=generator) ** 2 for _ in range(3)
            )
            made /= squares.sqrt()  # that of 3 degrees of freedom has a variance of 3
        return made.cpu()

    files = {}
    for number, names in enumerate(_shards(shapes)):
        file = f"model-{number:05}.safetensors"
        tensors = {name: weight(name) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    total = sum(2 * math.prod(size) for size in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def deviation(name: str, spec: ModelSpec) -> float:
    """Return the standard deviation of a matrix.

    In a model with experts the embedding has 1, and what adds to the residual stream is scaled down
    by the square root of the number of such layers (GPT-2), so that tokens stay apart.

    Args:
        name: of its tensor in a checkpoint.
        spec: the model.
    """
    if not spec.experts:
        return STD
    if name.endswith("embed_tokens.weight"):
        return 1.0
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    return STD / math.sqrt(2 * len(spec.layers)) if adds else STD


def of_checkpoint(name: str, size: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a checkpoint has for a parameter of transformers.

    transformers 5 holds the experts of a layer as stacks, checkpoints have a tensor for each.

    Args:
        name: of the parameter.
        size: its shape; of a stack ``[experts, out, in]``.
    """
    if len(size) != 3:
        return {name: size}
    (experts, _, kind), (count, rows, columns) = name.rpartition("."), size
    kinds = FUSED.get(kind, (kind,))
    return {
        f"{experts}.{expert}.{each}.weight": (rows // len(kinds), columns)
        for expert in range(count)
        for each in kinds
    }


def make_tokenizer(shape: Mapping[str, Any]) -> Any:
    """Return a tokenizer with a word for every id of the model; a text has spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = words(shape)
    ids = {word: i for i, word in enumerate(made)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=made[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=made[shape["bos_token_id"]],
        eos_token=made[shape["eos_token_id"]],
        unk_token=made[-1],
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = CHAT
    return hf


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    held = 0
    for name, size in shapes.items():
        taken = 2 * math.prod(size)
        if names and held + taken > SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += taken
    yield names


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=tuple(SIZES), default="4b")
    parser.add_argument("--layers", type=int, help="in the place of the size's own")
    parser.add_argument("--experts", type=int, help="of a layer, in the place of the size's own")
    parser.add_argument("--plain", action="store_true", help="0.02 in every matrix")
    parser.add_argument("--heavy-tails", action="store_true", help="some numbers far larger")
    options = parser.parse_args()
    shape = shape_of(options.size)
    if options.layers is not None:
        shape["num_hidden_layers"] = options.layers
    if options.experts is not None:
        if options.experts < shape.get("num_experts_per_tok", math.inf):
            parser.error(f"--size {options.size} has no {options.experts} experts a layer.")
        shape["num_experts"] = options.experts
    folder = make_model(options.folder, shape)
    make_weights(folder, plain=options.plain, heavy_tails=options.heavy_tails)


if __name__ == "__main__":
    main()
