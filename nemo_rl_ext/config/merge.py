"""From the ``fp8rl`` block and upstream's keys to the plan of a run.

The block says what runs in FP8. Upstream's own keys keep their meaning and add to it where it is
silent. Where both speak and differ, or where fp8rl has no counterpart, the key is refused by its
full path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from nemo_rl_ext.config import checks
from nemo_rl_ext.config.drivers import (
    ARGUMENTS,
    BLOCK,
    DTENSOR,
    FSDP,
    GUARD,
    LOSS,
    MEGATRON,
    QUANTIZATION,
    VLLM,
    check_places,
)
from nemo_rl_ext.config.exact import require_both_sections
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.config.keys import Sections, block_path, has_fp8_kv, kv_dtype
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.config.rules import OFF, Rule, refuse
from nemo_rl_ext.config.value_kinds import refuse_wrong_kinds

_MODES = {"tis": "truncate", "icepop": "mask"}
_OF_ROLLOUTS: tuple[Rule, ...] = (
    (
        f"{VLLM}.is_mx",
        OFF,
        "is true, which asks for MXFP8 (groups of 32 with E8M0 scales), and fp8rl's engines "
        "multiply blocks of 128 alone; set it to false (with pow2 scales the rollouts of fp8rl "
        f"suit Blackwell, by allow_untested_gpu), or remove '{VLLM}.{BLOCK}'.",
    ),
    (
        "policy.generation.quant_cfg",
        (None,),  # upstream asks the same
        f"is another number format than fp8rl's; remove it or '{VLLM}.{BLOCK}'.",
    ),
    (
        "policy.generation.nvfp4_pertoken_rollout.enabled",  # newer than 7ea279a
        OFF,
        f"is true, which samples in NVFP4; set it to false, or remove '{VLLM}.{BLOCK}'.",
    ),
    (
        f"{VLLM}.quantization_ignore_patterns",  # newer than 7ea279a, refused there without MXFP8
        (None, [], ()),
        f"is a list of MXFP8's; write its names into '{VLLM}.{BLOCK}.pins.names' and remove it.",
    ),
    (
        f"{VLLM}.precision",
        (None, "auto", "bfloat16", "bf16", "fp8"),
        f"is {{!r}}; with '{VLLM}.{BLOCK}' it can only be 'fp8' or 'bfloat16'.",
    ),
    (
        f"{VLLM}.refit_prequantize",  # newer than 7ea279a
        OFF,
        "is true, by which the trainer sends MXFP8 weights, and fp8rl's engines take BF16; set it "
        f"to false, or remove '{VLLM}.{BLOCK}'.",
    ),
)
_OF_TRAINING: tuple[Rule, ...] = (
    *(
        (
            f"{MEGATRON}.model_overrides.{key}",
            (None,),
            f"switches Transformer Engine's FP8 on beside '{MEGATRON}.{BLOCK}'; remove one of "
            "them.",
        )
        for key in ("fp8", "fp8_recipe", "fp8_quantizer_factory")
    ),
    (
        f"{MEGATRON}.fp4_cfg.enabled",  # newer than 7ea279a
        OFF,
        f"is true, which trains in NVFP4; set it to false, or remove '{MEGATRON}.{BLOCK}'.",
    ),
    (
        f"{MEGATRON}.zero_train_gen_mismatch",  # newer than 7ea279a
        OFF,
        "is true, by which upstream's kernels make Megatron's own generation exact, not fp8rl's "
        f"layers; set it to false, and '{MEGATRON}.{BLOCK}.exact' to true where it is served.",
    ),
)

# Its workers train a model of transformers by FSDP2, which torch_fp8rl converts. The section may
# have its other name.
_FSDP_ALONE = (
    f"is {{}}, and FP8 training with '{DTENSOR}.{BLOCK}' is served by FSDP2 alone; set it to 1, "
    "or train with Megatron."
)
_SYNCHRONOUS = (
    f"is true, and FP8 training with '{DTENSOR}.{BLOCK}' is served in the synchronous loop of GRPO "
    "alone; set it to false, or train with Megatron."
)
_OF_DTENSOR: tuple[Rule, ...] = (
    (f"{DTENSOR}.tensor_parallel_size", (None, 1), _FSDP_ALONE),
    (f"{DTENSOR}.context_parallel_size", (None, 1), _FSDP_ALONE),
    (
        f"{DTENSOR}.lora_cfg.enabled",
        OFF,
        "is true, and rollouts get merged weights, whose FP8 codes differ from the trainer's base "
        f"weights; set it to false, or remove '{DTENSOR}.{BLOCK}'.",
    ),
    (
        "policy.precision",
        (None, "bfloat16"),
        f"is '{{}}'; with '{DTENSOR}.{BLOCK}' it can only be bfloat16, from which weights are "
        "quantized.",
    ),
    ("grpo.async_grpo.enabled", OFF, _SYNCHRONOUS),
    (f"{VLLM}.async_engine", OFF, _SYNCHRONOUS),
    ("data_plane.enabled", OFF, _SYNCHRONOUS),
)
_OF_AUTOMODEL: tuple[Rule, ...] = (
    (f"{DTENSOR}.expert_parallel_size", (None, 1), _FSDP_ALONE),
    (
        f"{DTENSOR}.automodel_kwargs.force_hf",
        (None, True),
        "is false, by which Automodel builds a model of its own; FP8 training is served for those "
        f"of transformers: set it to true, or remove '{DTENSOR}.{BLOCK}'.",
    ),
    *(
        (
            f"{DTENSOR}.automodel_kwargs.{key}",
            (None, False),
            f"puts other modules in the place of those that '{DTENSOR}.{BLOCK}' converts; remove "
            "it, or the block.",
        )
        for key in ("backend", "use_liger_kernel", "fp8_config", "quantization_config")
    ),
)


def read(sections: Sections) -> RunPlan | None:
    """Read and check the keys, and make the plan of the run; nothing is changed.

    The model is not looked at: see :func:`nemo_rl_ext.config.model_pins.check_model`.

    Returns:
        None where the config has no ``fp8rl`` key at all.
    """
    driver, blocks = sections.driver, sections.blocks
    check_places(sections.config, driver)
    copies = {
        path: sections.at(path)[BLOCK]
        for path in ("", ARGUMENTS)
        if sections.at(path).get(BLOCK) is not None
    }
    unused = [block_path(path) for path in copies if not blocks or (path and VLLM not in blocks)]
    if LOSS not in blocks and sections.loss.get(GUARD) is not None:
        if blocks:
            raise RecipeError(f"'{LOSS}.{GUARD}' needs '{LOSS}.{BLOCK}'; set both or neither.")
        unused.insert(0, f"{LOSS}.{GUARD}")
    if unused:
        places = " and ".join(f"'{block_path(path)}'" for path in driver.serves)
        raise RecipeError(
            f"'{unused[0]}' is set, but no section uses it; interpolate the recipe into {places}."
        )
    if not blocks:
        return None
    refuse_wrong_kinds(sections)
    first = block_path(next(iter(blocks)))
    block = next(iter(blocks.values()))
    given = Recipe.from_dict(block, where=first)
    for path, other in {**blocks, **copies}.items():
        if other != block:
            Recipe.from_dict(other, where=block_path(path))
            keys = sorted(k for k in {*block, *other} if block.get(k) != other.get(k))
            raise RecipeError(
                f"'{block_path(path)}' differs from '{first}' in {', '.join(keys)}; interpolate "
                "all of them from one block."
            )
    checks.refuse_unread_settings(block, given, first, sections)
    if given.exact:
        require_both_sections(first, sections)
    merged = _Merge(block, first)
    notes: list[str] = []
    backend = sections.generation.get("backend", "vllm")
    for path in (VLLM, MEGATRON, *FSDP):
        # Another engine would sample from our trainer, or in its place, without our worker.
        if path in blocks and VLLM in driver.serves and backend != "vllm":
            raise UnsupportedError(
                f"'{path}.{BLOCK}' needs 'policy.generation.backend' vllm, not '{backend}'."
            )
    if VLLM in blocks:
        _rollout(merged, sections)
        fused = sections.megatron.get("enabled") and sections.megatron.get("apply_rope_fusion")
        if fused and "rope_dtype" not in merged.data:  # rollouts rotate as the trainer does
            merged.add("rope_dtype", "float32", f"{MEGATRON}.apply_rope_fusion")
    else:
        _refuse_fp8_without_block(sections, VLLM, "precision", sections.vllm.get("precision"))
        merged.data["rollout"] = False
    if sections.trainer != MEGATRON and sections.is_trainer_ours:
        rules = _OF_DTENSOR + (_OF_AUTOMODEL if sections.builds_by_automodel else ())
        name = sections.trainer
        renamed = ((p.replace(DTENSOR, name), a, t.replace(DTENSOR, name)) for p, a, t in rules)
        refuse(renamed, sections)
    elif sections.trainer != MEGATRON:
        merged.data["training"] = False
        trainer = sections.other_trainer
        notes.append(f"the {trainer} trainer runs in BF16; only the rollouts run in FP8.")
    elif MEGATRON in blocks:
        _training(merged, sections)
    else:
        enabled = sections.at(f"{MEGATRON}.fp8_cfg").get("enabled")
        _refuse_fp8_without_block(sections, MEGATRON, "fp8_cfg.enabled", enabled)
        merged.data["training"] = False
    if LOSS in blocks:
        _loss(merged, sections.loss)
    recipe = Recipe.from_dict(merged.data, where=first)
    dtype = kv_dtype(recipe)
    kv_scales: Literal["trainer", "engine"] | None = None
    if has_fp8_kv(recipe):
        kv_scales = "trainer" if sections.sends_kv_scales else "engine"
    if kv_scales == "engine":
        notes.append("no KV scales are sent; vLLM calibrates them itself after each refit.")
    if not sections.trainer_can_round(dtype):
        if dtype != "auto" and recipe.kv_cache.in_training:
            checks.refuse_in_training(block, first, sections)
            reason = (
                "each engine has KV scales of its own, and NeMo RL does not pass them back"
                if sections.megatron.get("enabled")
                else f"{sections.other_trainer} workers do not round K and V"
            )
            notes.append(
                "the trainer attends over K and V in its own dtype (kv_cache.in_training false): "
                f"{reason}."
            )
        kv_cache = recipe.kv_cache.model_copy(update={"in_training": False})
        recipe = recipe.model_copy(update={"kv_cache": kv_cache})
    checks.refuse_unserved(recipe, sections)
    if recipe.exact and checks.leaves_out_logprobs(sections):
        notes.append(
            "whether exact holds is not checked: 'loss_fn.force_on_policy_ratio' leaves out the "
            "trainer's log-probabilities."
        )
    guard = None
    if sections.loss.get(GUARD) is not None:
        guard = GuardConfig.from_dict(sections.loss[GUARD], where=f"{LOSS}.{GUARD}")
    return RunPlan(
        driver=driver.name,
        recipe=recipe,
        sections=tuple(blocks),
        model=sections.policy.get("model_name") or "",
        megatron=bool(sections.megatron.get("enabled")),
        kv_scales=kv_scales,
        guard=guard,
        queues_batches=_queues_batches(sections),
        notes=tuple(notes),
    )


def _refuse_fp8_without_block(sections: Sections, section: str, key: str, value: Any) -> None:
    if value in ("fp8", True) and section in sections.driver.serves:
        raise RecipeError(
            f"'{section}.{key}' is {str(value).lower()} without '{section}.{BLOCK}'; rollouts and "
            "training must run by one recipe, so interpolate the block there as well."
        )


class _Merge:
    """A block, and what upstream's keys add to it."""

    def __init__(self, block: Mapping[str, Any], path: str) -> None:
        self.data: dict[str, Any] = {
            k: dict(v) if isinstance(v, Mapping) else v for k, v in block.items()
        }
        self.path = path

    def add(self, ours: str, value: Any, theirs: str) -> None:
        """Set ``ours`` (dotted) because ``theirs`` says so, unless the block says otherwise."""
        *parents, key = ours.split(".")
        target = self.data
        for parent in parents:
            target = target.setdefault(parent, {})
        if key in target and target[key] != value:
            raise RecipeError(
                f"'{theirs}' asks for {ours}={value!r}, but '{self.path}.{ours}' is "
                f"{target[key]!r}; remove one of them."
            )
        target[key] = value

    def extend_pins(self, key: str, value: Any) -> None:
        """Add to the pins of a kind."""
        pins = self.data.setdefault("pins", {})
        if isinstance(value, int):
            pins[key] = max(pins.get(key, 0), value)
        else:
            pins[key] = list(dict.fromkeys([*pins.get(key, ()), *value]))


def _rollout(merged: _Merge, sections: Sections) -> None:
    vllm = sections.vllm
    refuse(_OF_ROLLOUTS, sections)
    arguments = sections.at("policy.generation.vllm_kwargs")
    quantization = arguments.get("quantization")
    if quantization not in (None, QUANTIZATION):
        raise RecipeError(
            f"'policy.generation.vllm_kwargs.quantization' is '{quantization}', which contradicts "
            f"'{VLLM}.{BLOCK}'; remove one of them."
        )
    if vllm.get("precision") == "fp8":
        merged.add("rollout", True, f"{VLLM}.precision")
    for path, value in (
        (f"{VLLM}.kv_cache_dtype", vllm.get("kv_cache_dtype")),
        ("policy.generation.vllm_kwargs.kv_cache_dtype", arguments.get("kv_cache_dtype")),
    ):
        if value in ("fp8", "fp8_e4m3"):
            merged.add("kv_cache.dtype", "fp8_e4m3", path)
        elif value == "int8_per_token_head":
            merged.add("kv_cache.dtype", value, path)
        elif value not in (None, "auto"):
            raise UnsupportedError(
                f"'{path}' is {value!r}; with '{VLLM}.{BLOCK}' it can only be 'fp8' (E4M3), "
                "'int8_per_token_head' or 'auto'."
            )
    for key, target in (
        ("pow2_weight_scaling_factors", "weights.scale_format"),
        ("pow2_activation_scaling_factors", "activations.scale_format"),
    ):
        if vllm.get(key):
            merged.add(target, "pow2", f"{VLLM}.{key}")
    for key, pin in (("num_first_layers_in_bf16", "first"), ("num_last_layers_in_bf16", "last")):
        count = vllm.get(key)
        if count:
            merged.extend_pins(pin, count)
    key = "quantization_ignored_layer_kws"
    if vllm.get(key):
        merged.extend_pins("names", [f"*{word}*" for word in vllm[key]])


def _training(merged: _Merge, sections: Sections) -> None:
    megatron = sections.megatron
    fp8, overrides = (sections.at(f"{MEGATRON}.{key}") for key in ("fp8_cfg", "model_overrides"))
    if fp8.get("enabled"):
        for key, wanted in (("fp8", "e4m3"), ("fp8_recipe", "blockwise"), ("fp8_param", False)):
            if fp8.get(key, wanted) != wanted:
                raise UnsupportedError(
                    f"'{MEGATRON}.fp8_cfg.{key}' is {fp8[key]!r}; with '{MEGATRON}.{BLOCK}' it "
                    f"can only be {wanted!r}."
                )
        merged.add("training", True, f"{MEGATRON}.fp8_cfg.enabled")
    refuse(_OF_TRAINING, sections)
    # Upstream reads the first, its YAMLs have the second too.
    for keys in (overrides, megatron):
        if keys.get("first_last_layers_bf16"):
            # Megatron-Core's defaults of both numbers are 1.
            for pin, key in (("first", "start"), ("last", "end")):
                key = f"num_layers_at_{key}_in_bf16"
                count = 1 if keys.get(key) is None else keys[key]
                merged.extend_pins(pin, count)


def _loss(merged: _Merge, loss: Mapping[str, Any]) -> None:
    kind = loss.get("truncated_importance_sampling_type")
    if kind is not None:
        theirs = f"{LOSS}.truncated_importance_sampling_type"
        if kind not in _MODES:
            raise UnsupportedError(
                f"'{theirs}' is '{kind}'; with '{LOSS}.{BLOCK}' write it as "
                "importance_sampling.rejection with level 'geometric' and remove the key."
            )
        low = loss.get("truncated_importance_sampling_ratio_min")
        mode = "clip" if kind == "tis" and low else _MODES[kind]
        merged.add("importance_sampling.mode", mode, theirs)
        for target, key in (("high", "ratio"), ("low", "ratio_min")):
            path = f"{LOSS}.truncated_importance_sampling_{key}"
            if value := loss.get(f"truncated_importance_sampling_{key}"):
                merged.add(f"importance_sampling.{target}", float(value), path)
    if loss.get("sequence_level_importance_ratios"):
        # Upstream's key is first of all GSPO's ratio, so the block may weigh in another way.
        merged.data.setdefault("importance_sampling", {}).setdefault("level", "sequence")


def _queues_batches(sections: Sections) -> bool:
    """Tell whether a loop may train batches that were sampled before the latest refit."""
    name = sections.driver.name
    if name == "single_controller":
        return True
    loop = sections.at(f"{name}.async_{name}")
    return bool(loop.get("enabled") and loop.get("max_trajectory_age_steps"))
