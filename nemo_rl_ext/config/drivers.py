"""NeMo RL's drivers, and which of our keys each of them serves.

NeMo RL's configs accept any key, so a block at a path that nobody reads would be ignored silently.
Each :class:`Driver` lists what it serves, and :func:`check_places` searches the whole config for
our keys and for misspelt ones. It uses only the standard library, because every driver of NeMo RL
runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

VLLM = "policy.generation.vllm_cfg"
MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
AUTOMODEL = "policy.automodel_cfg"
"""The section's name since NeMo RL 0.8.0, which has Automodel's worker alone."""
FSDP = (DTENSOR, AUTOMODEL)
LOSS = "loss_fn"
BLOCK = "fp8rl"
GUARD = "fp8rl_guard"
WORKER_KEY = "worker_extension_cls_fqn"
"""Of ``policy`` and ``policy.generation``, newer than 7ea279a: the class of the workers."""
PLAN = "fp8rl_plan"
"""Written into ``policy`` and ``loss_fn``: the run's :class:`nemo_rl_ext.config.plan.RunPlan`."""
ARGUMENTS = "policy.generation.vllm_kwargs.additional_config"
"""Where vLLM's plugin reads its block; it is written from the one at :data:`VLLM`."""

QUANTIZATION = "fp8rl"
"""``vllm_fp8rl.NAME``, by which vLLM knows the plugin; reading a config must import no engine."""


@dataclass(frozen=True)
class Driver:
    """A training loop of NeMo RL, whose scripts all use one class ``MasterConfig``."""

    name: str
    module: str
    """Module that defines its ``MasterConfig``."""
    scripts: tuple[str, ...]
    """Paths below ``examples/``."""
    section: str
    """Top-level key that its configs have. A driver that comes later in :data:`DRIVERS` may be a
    special case of one before it, whose key its configs have as well."""
    serves: tuple[str, ...]
    """Sections whose ``fp8rl`` is read."""
    unsupported_reason: str = ""
    """Why it does not serve the other sections."""
    sends_kv_scales: bool = False
    """Whether the loop sends KV scales of a trainer that makes them with its refits."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Full paths of the keys that are read."""
        blocks = [f"{section}.{BLOCK}" for section in self.serves]
        if VLLM in self.serves:
            blocks.append(f"{ARGUMENTS}.{BLOCK}")
        if LOSS in self.serves:
            blocks += [f"{LOSS}.{key}" for key in (GUARD, PLAN)]
        return (*blocks, f"policy.{PLAN}")


_ALL = (VLLM, MEGATRON, LOSS)
_ALGORITHMS = "nemo_rl.algorithms"
_GENERATES_NOTHING = "it generates nothing, and its loss compares no two engines"
_TABLE = (
    Driver(
        "grpo",
        f"{_ALGORITHMS}.grpo",
        (
            "run_grpo.py",
            "run_vlm_grpo.py",
            "run_grpo_sliding_puzzle.py",
            "nemo_gym/run_grpo_nemo_gym.py",
        ),
        "grpo",
        (*_ALL, *FSDP),
        sends_kv_scales=True,
    ),
    Driver(
        "single_controller",
        f"{_ALGORITHMS}.single_controller_utils.config",
        ("run_grpo_single_controller.py",),
        "async_rl",
        _ALL,
        sends_kv_scales=True,
    ),
    Driver(
        "ppo", f"{_ALGORITHMS}.ppo", ("run_ppo.py",), "ppo", _ALL, "the value model stays in BF16"
    ),
    Driver(
        "distillation",
        f"{_ALGORITHMS}.distillation",
        ("run_distillation.py", "nemo_gym/run_distillation_nemo_gym.py"),
        "distillation",
        (VLLM, MEGATRON),
        "the teacher stays in BF16, and the loss takes no logprobs of the rollouts",
    ),
    Driver(
        "sft",
        f"{_ALGORITHMS}.sft",
        ("run_sft.py", "run_vlm_sft.py"),
        "sft",
        (MEGATRON, *FSDP),
        _GENERATES_NOTHING,
    ),
    Driver(
        "dpo",
        f"{_ALGORITHMS}.dpo",
        ("run_dpo.py",),
        "dpo",
        (MEGATRON, *FSDP),
        _GENERATES_NOTHING,
    ),
)
DRIVERS = {driver.name: driver for driver in _TABLE}


def driver_of(config: Mapping[str, Any]) -> Driver | None:
    """Return the driver that a whole config is for, by its top-level keys; None if none fits."""
    found = [driver for driver in _TABLE if config.get(driver.section) is not None]
    return found[-1] if found else None


def is_our_worker(name: Any) -> bool:
    """Tell whether a value of :data:`WORKER_KEY` names one of our classes."""
    return str(name).startswith("nemo_rl_ext.workers.")


def meant(key: Any) -> str | None:
    """Return the key of ours that ``key`` is or is probably meant to be, or None."""
    ours = {_letters(name): name for name in (BLOCK, GUARD, PLAN)}
    last = _letters(str(key).rpartition(".")[2])
    for near in get_close_matches(last, ours, n=1, cutoff=0.8):
        return ours[near]
    # `fp8rl_cfg`, as upstream's `fp8_cfg` is called, or `fp8rl.pins`; not `env_vars.FP8RL_DEBUG`.
    return BLOCK if BLOCK in _letters(key) and not str(key).startswith("FP8RL_") else None


def _letters(key: Any) -> str:
    return "".join(filter(str.isalnum, str(key).lower()))


def find(config: Any, path: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Find every key of a config, at any depth, that is ours or a misspelling of one.

    Yields:
        Full path, key, the key of ours that is meant, value.
    """
    if hasattr(config, "model_dump"):
        config = config.model_dump()
    if isinstance(config, Mapping):
        for key, value in config.items():
            place = f"{path}.{key}" if path else str(key)
            ours = meant(key)
            if ours is not None:
                yield place, key, ours, value
            else:
                yield from find(value, place)
    elif isinstance(config, list | tuple):
        for number, value in enumerate(config):
            yield from find(value, f"{path}[{number}]")


def check_places(config: Any, driver: Driver) -> bool:
    """Refuse a key of ours that this driver does not read; null counts as absent.

    Returns:
        Whether the config has any key of ours.
    """
    asked = False
    for path, key, ours, value in find(config):
        if key != ours:
            raise _refusal(
                f"'{path}' is no key of NeMo RL or fp8rl; write '{ours}' in its section."
            )
        if value is None:
            continue
        if path != BLOCK and path not in driver.keys:
            raise _refusal(f"'{path}' has no effect{_instead(driver, ours)}")
        asked = True
    return asked


def refuse_unread(loaded: Any) -> None:
    """Refuse a config with our keys in a driver that uses none of the known config classes."""
    from omegaconf import OmegaConf

    for path, key, ours, value in find(OmegaConf.to_container(loaded, resolve=False)):
        if key == ours and value is None:
            continue
        from fp8rl.errors import UnsupportedError

        scripts = ", ".join(script for driver in DRIVERS.values() for script in driver.scripts)
        raise UnsupportedError(
            f"'{path}' is not read by this driver, whose config is made by no class that fp8rl "
            f"knows; remove it, or run one of NeMo RL's own: {scripts}."
        )


def _instead(driver: Driver, ours: str) -> str:
    reason = f" in {driver.scripts[0]}" + (
        f": {driver.unsupported_reason}" if driver.unsupported_reason else ""
    )
    places = [key for key in driver.keys if key.endswith(f".{ours}") and ARGUMENTS not in key]
    if not places:
        return f"{reason}; remove it."
    return f"{reason}; move it to {' or '.join(repr(place) for place in places)}, or remove it."


def _refusal(message: str) -> Exception:
    from fp8rl.errors import RecipeError

    return RecipeError(message)
