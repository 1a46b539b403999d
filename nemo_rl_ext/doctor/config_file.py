"""Read a YAML of NeMo RL as its drivers do: parents under ``defaults``, then interpolations."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from fp8rl.errors import Fp8RLError, OptionError, RecipeError, UnsupportedError
from fp8rl.reading import parse_yaml, printable
from nemo_rl_ext.config.drivers import DRIVERS, LOSS, MEGATRON, Driver, driver_of
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.rules import broken
from nemo_rl_ext.config.value_kinds import KINDS, SIZES

_RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""Functions of interpolations that NeMo RL registers (``nemo_rl/utils/config.py``)."""
_CONVERTED = (
    "cluster.",
    f"{MEGATRON}.",
    "policy.generation.colocated.",
    f"{LOSS}.",
    "grpo.",
    "ppo.",
    "async_rl.",
    "data_plane.",
)
"""Where NeMo RL's config classes declare their values, and so convert them from text."""


def load_config(file: Path) -> dict[str, Any]:
    """Read a config, its parents first, and resolve its interpolations."""
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise UnsupportedError(
            "A config of NeMo RL is read by OmegaConf, which is not installed; install omegaconf."
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OmegaConf 2.4 has a new name for it
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)
    try:
        loaded = OmegaConf.to_container(_with_parents(file, ()), resolve=True)
    except Fp8RLError:
        raise
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        key = getattr(error, "full_key", None)
        place = f" at '{key}'" if key else ""
        raise RecipeError(
            f"'{file}' cannot be resolved{place}: {first.rstrip('.')}; correct the key, or set the "
            "environment variable that it names."
        ) from None
    assert isinstance(loaded, dict)  # _with_parents returns mappings alone
    return {str(key): value for key, value in loaded.items()}


def load_run(file: Path) -> tuple[dict[str, Any], Driver]:
    """Read a config, find its driver, and make numbers of texts where NeMo RL does."""
    config = load_config(file)
    driver = driver_of(config)
    if driver is None:
        known = ", ".join(driver.section for driver in DRIVERS.values())
        raise UnsupportedError(
            f"'{file}' is a config of no driver that fp8rl knows: it has none of the sections "
            f"{known}; give the config of a run."
        )
    sections = Sections(config, driver)
    for path, value, fits, _ in broken((*KINDS, *SIZES), sections):
        if not isinstance(value, str) or not path.startswith(_CONVERTED):
            continue
        section, _, key = path.rpartition(".")
        for kind in (int, float, bool):
            with contextlib.suppress(ValidationError):
                number = TypeAdapter(kind).validate_python(value)
                if fits(number):
                    cast(dict[str, Any], sections.at(section))[key] = number
                    break
    return config, driver


def _with_parents(file: Path, children: tuple[Path, ...]) -> Any:
    """Merge a file over the files that its ``defaults`` names, each over its own."""
    from omegaconf import OmegaConf

    if file.resolve() in children:
        raise RecipeError(f"'{file}' is a parent of itself; correct its 'defaults'.")
    config: Any = OmegaConf.create(_read(file, children))
    parents = config.pop("defaults", None) or []
    if OmegaConf.is_config(parents):
        parents = OmegaConf.to_container(parents, resolve=True)
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list):
        raise RecipeError(
            f"'defaults' of '{file}' is {parents!r}; write the path of a YAML, or a list of them."
        )
    base = OmegaConf.create({})
    for parent in parents:
        path = file.parent / str(parent)
        base = _merge(base, _with_parents(path, (*children, file.resolve())))
    return _merge(base, config)


def _merge(base: Any, config: Any) -> Any:
    """Merge as NeMo RL does: a section with ``_override_: true`` replaces the base's."""
    from omegaconf import DictConfig, OmegaConf

    for key in config:
        if OmegaConf.is_missing(config, key) or not isinstance(config[key], DictConfig):
            continue
        if config[key].pop("_override_", False):
            base.pop(key, None)
    return OmegaConf.merge(base, config)


def _read(file: Path, children: tuple[Path, ...]) -> str:
    """Read the text of a YAML mapping, which OmegaConf parses once more by its own rules."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        remedy = (
            f"correct the 'defaults' of '{children[-1]}'" if children else "give the path of a YAML"
        )
        raise OptionError(f"'{printable(str(file))}' cannot be read ({why}); {remedy}.") from None
    data = parse_yaml(text, f"'{file}'", block="fp8rl")
    if not isinstance(data, dict):
        raise RecipeError(
            f"'{file}' holds a {type(data).__name__}, not a mapping of config keys; correct it."
        )
    return text
