"""`Recipe`: the one description of what runs in FP8.

It is read once (YAML, JSON, dict, or an engine's config keys) and travels between processes as
the plain dict of :meth:`Recipe.to_dict`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fp8rl.errors import RecipeError
from fp8rl.reading import explain, near_miss, parse_json, parse_yaml, printable

RECIPE_ENV = "FP8RL_RECIPE"
"""Environment variable of a standalone engine: a path to a recipe, or the recipe as JSON."""
_OF_OTHERS = "FP8_RECIPE"
"""Not a misspelling of ``FP8RL_RECIPE``: launch scripts keep TransformerEngine's recipe there."""

ScaleFormat = Literal["fp32", "pow2"]
RopeDtype = Literal["auto", "float32"]
KVDtype = Literal["fp8_e4m3", "int8_per_token_head", "auto"]
Recalibrate = Literal["refit", "grow", "start"]
ModuleKind = Literal[
    "qkv_proj",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "experts",
    "router",
    "lm_head",
    "embed_tokens",
    "norm",
    "a_proj",
    "b_proj",
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
    "conv1d",
    "tower",
    "linear",
]
# Readers of YAML 1.1, as OmegaConf is for NeMo RL's files, take a bare `off` for false.
ISMode = Annotated[
    Literal["truncate", "clip", "mask", "off"],
    BeforeValidator(lambda v: "off" if v is False else v),
]
# Files have lists where the model has tuples; their items stay strict.
_List = Field(strict=False)
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Section(BaseModel):
    # Strict: nothing is cast, so that `last: true` or `last: "1"` is an error and not 1.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _any_mapping(cls, data: Any) -> Any:
        """Accept mappings other than dicts, such as OmegaConf's, which strict models refuse."""
        return dict(data) if isinstance(data, Mapping) else data


class WeightFormat(_Section):
    """Weights: E4M3 codes and one scale per block (DeepSeek-V3 technical report, section 3.3)."""

    block: Annotated[tuple[Literal[128], Literal[128]], _List] = (128, 128)
    """Rows and columns of the block of weight elements that share a scale."""
    scale_format: ScaleFormat = "fp32"
    """``fp32``: any scale; ``pow2``: powers of two."""


class ActivationFormat(_Section):
    """Activations and gradients: E4M3 codes and one scale per ``1 x group`` elements."""

    group: Literal[128] = 128
    """Number of activation or gradient elements that share a scale."""
    scale_format: ScaleFormat = "fp32"
    """``fp32``: any scale; ``pow2``: powers of two."""


class Pins(_Section):
    """Modules kept in BF16. Embedding, output projection, norms and routers always are."""

    layers: Annotated[tuple[int, ...], _List] = ()
    """Global decoder-layer numbers; negative ones count from the end."""
    first: Annotated[int, Field(ge=0)] = 0
    """Number of first decoder layers."""
    last: Annotated[int, Field(ge=0)] = 0
    """Number of last decoder layers."""
    names: Annotated[tuple[str, ...], _List] = ()
    """Globs on the global HF module name, e.g. ``model.layers.*.mlp.down_proj``."""
    kinds: Annotated[tuple[ModuleKind, ...], _List] = ()
    """Kinds of modules."""
    fp8: Annotated[tuple[str, ...], _List] = ()
    """Globs of modules that the model's family keeps in BF16 by default and that run in FP8 here,
    e.g. ``*.kv_b_proj``."""

    def merged(self, other: Pins) -> Pins:
        """Return the union of two sets of pins."""
        return Pins(
            layers=tuple(dict.fromkeys(self.layers + other.layers)),
            first=max(self.first, other.first),
            last=max(self.last, other.last),
            names=tuple(dict.fromkeys(self.names + other.names)),
            kinds=tuple(dict.fromkeys(self.kinds + other.kinds)),
            fp8=tuple(dict.fromkeys(self.fp8 + other.fp8)),
        )


class KVCache(_Section):
    """KV cache of the rollout engine, how its scales are made, and what the trainer makes of it."""

    dtype: KVDtype = "fp8_e4m3"
    """``fp8_e4m3``: one scale for K and one for V of a layer, sent with each refit;
    ``int8_per_token_head``: INT8 with a scale for each token and head, which the engine makes
    itself, so that ``recalibrate`` and ``margin`` mean nothing; ``auto`` keeps the cache in the
    model's dtype."""
    recalibrate: Recalibrate = "refit"
    """``refit``: new scales with each refit; ``grow``: scales that only grow; ``start``: scales
    that stay."""
    margin: Annotated[float, Field(ge=1.0, le=16.0, allow_inf_nan=False)] = 1.05
    """Headroom for values the observers have not seen: a scale is the smallest power of two at or
    above ``amax * margin / 448``. 2 by default with ``grow``, 4 with ``start``."""
    in_training: bool = True
    """Attention in fp8rl's trainers sees K and V as the rollout's FP8 or INT8 cache holds them."""

    @property
    def has_scales(self) -> bool:
        """Whether the cache has scales that a calibration makes and engines must be given."""
        return self.dtype == "fp8_e4m3"

    @model_validator(mode="before")
    @classmethod
    def _margin_of_lasting_scales(cls, data: Any) -> Any:
        """Give scales that outlive a refit more headroom, unless a margin is set."""
        if not isinstance(data, Mapping) or "margin" in data:
            return data
        margins = {"grow": 2.0, "start": 4.0}
        kind = data.get("recalibrate")
        return {**data, "margin": margins[kind]} if kind in ("grow", "start") else data


class Rejection(_Section):
    """Drop tokens or sequences whose ratio leaves ``[low, high]``, whatever their weight."""

    level: Literal["token", "sequence", "geometric"] = "geometric"
    """What a ratio is taken over: a token, a sequence (product), or its geometric mean."""
    low: Positive | None = None
    """Lower bound; one of the two bounds is needed."""
    high: Positive | None = None
    """Upper bound; one of the two bounds is needed."""

    @model_validator(mode="after")
    def _ordered(self) -> Rejection:
        if self.low is None and self.high is None:
            raise ValueError("rejection needs 'low' or 'high'; remove the section to switch it off")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"rejection.low={self.low} must be below rejection.high={self.high}")
        return self


class ImportanceSampling(_Section):
    """Correction for the gap between the rollout policy and the trainer's policy."""

    corrector: str = "is"
    """Name of the corrector; plugins add names through ``register_is_correctors``."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """What a ratio is taken over: a token, a sequence (product), or its geometric mean."""
    mode: ISMode = "truncate"
    """``truncate``: min(ratio, high); ``clip``: clamp to [low, high]; ``mask``: 0 outside of it;
    ``off``: weight 1."""
    low: Positive | None = None
    """Lower bound, for ``clip`` and ``mask``."""
    high: Positive = 2.0
    """Upper bound."""
    self_normalize: bool = False
    """Divide the weights by their mean."""
    log_ratio_clamp: Annotated[float, Field(gt=0.0, le=88.0, allow_inf_nan=False)] = 20.0
    """Largest magnitude of a log ratio; exp of more than 88 is infinite in float32."""
    rejection: Rejection | None = None
    """Drop tokens or sequences, whatever their weight."""
    token_veto: Positive | None = None
    """Drop a whole sequence when any of its tokens has a ratio below this value."""

    @model_validator(mode="after")
    def _bounds(self) -> ImportanceSampling:
        if self.mode == "truncate" and self.low is not None:
            raise ValueError("'low' has no meaning with mode 'truncate'; use mode 'clip'")
        if self.mode in ("clip", "mask") and self.low is None:
            raise ValueError(f"importance_sampling.mode '{self.mode}' needs 'low'")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"importance_sampling.low={self.low} must be below high={self.high}")
        return self


class Recipe(_Section):
    """What runs in FP8, from weights to loss.

    The default is the published recipe (NVIDIA NeMo RL, April 2026): block-wise FP8 linear layers
    in rollout and training, FP8 KV cache, token-level truncated importance sampling.
    """

    rollout: bool = True
    """FP8 linear layers in the rollout engine."""
    training: bool = True
    """FP8 linear layers in the trainer."""
    weights: WeightFormat = WeightFormat()
    """Format of FP8 weights."""
    activations: ActivationFormat = ActivationFormat()
    """Format of FP8 activations and gradients."""
    pins: Pins = Pins()
    """Modules kept in BF16; a module is pinned if any key names it."""
    kv_cache: KVCache = KVCache()
    """KV cache of the rollout engine."""
    rope_dtype: RopeDtype = "auto"
    """Rotary embedding of the rollout engine. ``auto``: cos and sin in the model's dtype;
    ``float32``: as in TransformerEngine's fused kernel (Megatron-Core's ``apply_rope_fusion``)."""
    importance_sampling: ImportanceSampling = ImportanceSampling()
    """Correction of the loss for the gap between rollout and trainer."""
    exact: bool = False
    """Rollout and trainer compute every place by the same kernels, whose result for a token does
    not depend on the batch: log-probabilities are then equal to the bit. Models of Llama's and
    Qwen3's families on a CPU or a Hopper GPU, dense ones over two ranks of both engines too, and
    Qwen3-MoE on a Hopper GPU; refused elsewhere."""
    allow_untested_gpu: bool = False
    """FP8 rollouts start on a Blackwell GPU too, on which they have never run."""

    @model_validator(mode="after")
    def _as_published_for_blackwell(self) -> Recipe:
        formats = (self.weights.scale_format, self.activations.scale_format)
        if self.allow_untested_gpu and (self.training or formats != ("pow2", "pow2")):
            raise ValueError(
                "allow_untested_gpu needs training: false, and weights.scale_format and "
                "activations.scale_format pow2: of Blackwell only FP8 rollouts with such scales "
                "are known"
            )
        return self

    @model_validator(mode="after")
    def _exact_on_both_sides(self) -> Recipe:
        if not self.exact:
            return self
        rounds_alike = self.kv_cache.in_training or self.kv_cache.dtype == "auto"
        if not (self.rollout and self.training and rounds_alike):
            raise ValueError(
                "exact needs rollout, training and (over a cache of 8 bits) kv_cache.in_training "
                "to be true, because both engines must compute the same"
            )
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Validate a plain mapping.

        Args:
            data: keys of the recipe, see ``docs/reference.md``.
            where: path of ``data`` in the caller's config; an error puts it before each key.

        Raises:
            RecipeError: unknown key or bad value; the message has every key's full path.
        """
        if not isinstance(data, Mapping):
            raise RecipeError(
                f"{where} must be a mapping of recipe keys, not {type(data).__name__}."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise RecipeError(f"Bad recipe: {explain(error, where, cls)}") from None

    @classmethod
    def load(cls, source: str | os.PathLike[str], *, where: str = "recipe") -> Recipe:
        """Read a ``.yaml``/``.yml``/``.json`` file, or a JSON object given as a string.

        Args:
            source: path or JSON.
            where: name of the JSON object in an error; an error about a file has its path.

        Raises:
            RecipeError: no such file, not parseable, unknown key or bad value.
        """
        if not isinstance(source, str | os.PathLike):
            raise RecipeError(
                f"{where} is a {type(source).__name__}; give a path or a JSON object as a string, "
                "or give a mapping to Recipe.from_dict."
            )
        text = str(os.fspath(source))
        if text.lstrip().startswith("{"):
            return cls.from_dict(_unwrap(parse_json(text, where)), where=where)
        path = Path(text)
        try:
            if not text:
                raise FileNotFoundError  # the path of the current folder otherwise
            body = path.read_text(encoding="utf-8-sig")
        except IsADirectoryError:
            raise RecipeError(
                f"'{printable(text)}' is a folder; give the path of the recipe file in it."
            ) from None
        except UnicodeDecodeError:
            raise RecipeError(
                f"Recipe file '{printable(text)}' cannot be read: it is no text in UTF-8; give a "
                "YAML or JSON file."
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise RecipeError(
                f"Recipe file '{printable(text)}' does not exist; give a path or a JSON object."
            ) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise RecipeError(f"Recipe file '{printable(text)}' cannot be read: {why}.") from None
        data = (parse_json if path.suffix == ".json" else parse_yaml)(body, str(path))
        return cls.from_dict(_unwrap(data), where=str(path))

    @classmethod
    def from_env(cls) -> Recipe | None:
        """Return the recipe that :data:`RECIPE_ENV` names, or None if it is not set.

        Raises:
            RecipeError: see :meth:`load`; or a misspelling of the variable is set instead of it.
        """
        source = os.environ.get(RECIPE_ENV)
        if source:
            return cls.load(source, where=RECIPE_ENV)
        for variable in os.environ:
            if variable not in (RECIPE_ENV, _OF_OTHERS) and near_miss(variable, [RECIPE_ENV]):
                raise RecipeError(
                    f"The environment variable '{variable}' is not read by fp8rl; write "
                    f"'{RECIPE_ENV}', or unset it."
                )
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict that JSON can hold; ``Recipe.from_dict(r.to_dict()) == r``."""
        return self.model_dump(mode="json")


def _unwrap(data: Any) -> Any:
    """Return the recipe's keys, which an engine's config has one level deeper, under ``fp8rl``."""
    if isinstance(data, Mapping) and set(data) == {"fp8rl"}:
        data = data["fp8rl"]
    return {} if data is None else data
