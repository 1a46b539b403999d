"""Sizes and hyperparameters of a demo run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fp8rl.models.folder import INDEX
from fp8rl.models.pins import Pins
from fp8rl.recipe import KVCache, Positive, Recipe
from fp8rl_demo.tasks import Task, load_task
from fp8rl_demo.tokenizer import CharTokenizer, ChatTokenizer

Precision = Literal["bf16", "fp8-rollout", "fp8", "exact"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

DEMO_RECIPE = Recipe(pins=Pins(last=1))
"""The default recipe with the last decoder layer pinned to BF16."""

POSITIONS = 64
"""Most tokens of a sequence with the demo's own model."""

PRETRAINED = {
    "minibatches": 2,
    "microbatch_size": 16,
    "max_new_tokens": 128,
    "learning_rate": 5e-6,
    "validation_size": 128,
    "checkpoint_every": 50,
}
"""Defaults of :class:`Settings` that differ with a model of the user."""

_Count = Annotated[int, Field(ge=1)]
_Blocks = Annotated[int, Field(ge=128, multiple_of=128)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSize(_Frozen):
    """A Qwen3 small enough for one CPU core; every width is a multiple of the 128 block."""

    hidden_size: _Blocks = 256
    intermediate_size: _Blocks = 768
    num_layers: _Count = 4
    num_heads: _Count = 2
    num_kv_heads: _Count = 1
    head_dim: _Blocks = 128

    @model_validator(mode="after")
    def _heads(self) -> ModelSize:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        return self


class WarmStart(_Frozen):
    """Supervised training before GRPO, always in BF16."""

    steps: _Count = 500
    batch_size: _Count = 64
    learning_rate: Positive = 2e-3
    warmup_steps: _Count = 20


class Settings(_Frozen):
    """Everything that determines the results of a run, beside its recipe; stored in checkpoints."""

    seed: int = 0
    pretrained: str | None = None
    """Folder of the model; None: the demo makes one, of the size ``model``, and warm-starts it."""
    pretrained_name: str | None = None
    """Its name on the hub, whatever the revision, or its folder again. A run goes on with another
    revision: all weights are in its checkpoint."""
    task: str = "sums"
    """``sums``, or a dataset of reasoning-gym."""
    task_options: dict[str, Any] = {}
    """Arguments of that dataset."""
    compiled: bool = True
    """vLLM compiles the model on a GPU, which takes a minute; FP8 gains from it."""
    model: ModelSize = ModelSize()
    warm_start: WarmStart = WarmStart()
    prompts_per_step: _Count = 32
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    minibatches: _Count = 4
    """Optimizer steps per GRPO step. The first is on-policy, later ones need the PPO clip."""
    microbatch_size: _Count = 64
    max_new_tokens: _Count = 5
    learning_rate: Positive = 5e-5
    warmup_steps: _Count = 10
    """GRPO steps with a rising learning rate: Adam's moments are not settled yet."""
    clip_grad: Positive = 1.0
    validation_size: _Count = 200
    validation_every: _Count = 10
    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """0: no checkpoints."""

    @property
    def sequences(self) -> int:
        """Number of sequences in a GRPO step."""
        return self.prompts_per_step * self.samples_per_prompt


def recipe_for(precision: Precision, recipe: Recipe) -> Recipe:
    """Return the recipe of a precision: ``recipe`` for fp8, and changed for the others."""
    if precision == "fp8":
        return recipe
    if precision == "exact":  # it takes no pins
        return Recipe.from_dict({**recipe.to_dict(), "exact": True, "pins": {}})
    off: dict[str, Any] = {"training": False, "exact": False}
    if precision == "bf16":
        off |= {"rollout": False, "kv_cache": KVCache(dtype="auto")}
    return recipe.model_copy(update=off)


def task_of(settings: Settings) -> Task:
    """Return the problems of a run; see :func:`fp8rl_demo.tasks.load_task`."""
    in_words = settings.pretrained is not None
    return load_task(settings.task, settings.task_options, in_words=in_words)


def tokenizer_of(settings: Settings) -> CharTokenizer | ChatTokenizer:
    """Return the tokenizer of the model of a run."""
    if settings.pretrained is None:
        return CharTokenizer()
    return ChatTokenizer(Path(settings.pretrained))


def hf_config(settings: Settings) -> Any:
    """Return the config of the model, for transformers."""
    from transformers import AutoConfig, Qwen3Config

    if settings.pretrained is not None:
        return AutoConfig.from_pretrained(settings.pretrained, local_files_only=True)
    tokenizer, size = CharTokenizer(), settings.model
    return Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        dtype="bfloat16",
    )


def write_model_folder(settings: Settings, folder: Path) -> None:
    """Write ``config.json`` and tokenizer, which is all that ``load_format="dummy"`` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    if settings.pretrained is not None:
        for file in Path(settings.pretrained).iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != INDEX:
                shutil.copyfile(file, folder / file.name)
        return
    config = hf_config(settings)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    CharTokenizer().save_pretrained(folder)
