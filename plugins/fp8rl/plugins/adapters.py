"""What an engine package tells ``fp8rl doctor`` about its engine: adapter, diagnosis, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fp8rl.errors import PluginError
from fp8rl.recipe import Recipe


@dataclass(frozen=True)
class Section:
    """A table of a diagnosis."""

    title: str
    columns: tuple[str, ...]
    """Headings; all empty if the first column names what the second one says."""
    rows: tuple[tuple[str, ...], ...]
    """Cells of each row, one for each column."""


@dataclass(frozen=True)
class Diagnosis:
    """The state of one engine on this machine."""

    installed: str | None
    """Version found, or None."""
    supported: tuple[str, ...]
    """Versions this release was tested with."""
    facts: dict[str, str] = field(default_factory=dict)
    """Further rows, e.g. device, attention backend."""
    problems: tuple[str, ...] = ()
    """One sentence each, with the remedy; empty if there are none. For an engine that is not
    installed they say how to install it, and are shown to those who ask for the engine by name."""
    sections: tuple[Section, ...] = ()
    """Further tables, e.g. the kernel of each kind of layer."""


@dataclass(frozen=True)
class ConfigRequest:
    """A config that ``fp8rl doctor ENGINE CONFIG`` is asked about."""

    file: Path
    source: Path | None = None
    """Source checkout of the engine, instead of the installed one."""
    model: Path | None = None
    """Folder of a Hugging Face model, instead of the one that the config names."""
    recipe: Recipe | None = None
    """Recipe for a config that has none."""
    gpu_memory: float | None = None
    """Memory of a GPU, in GiB."""


@dataclass(frozen=True)
class ExactRequest:
    """What ``fp8rl exact`` asks a rollout engine and a trainer."""

    model: Path
    """Folder of a small Hugging Face model."""
    recipe: Recipe
    prompts: tuple[str, ...]
    record: Path
    """File that the rollout writes and the trainer reads; both know its form."""


@dataclass(frozen=True)
class Compared:
    """How many results of a module are equal to the bit, given equal inputs."""

    name: str
    equal: int
    total: int


@dataclass(frozen=True)
class EngineAdapter:
    """An engine and how to look at it without starting it.

    ``fp8rl doctor`` has a subcommand of its ``name``. It takes the config of a run where the engine
    has ``examine_config``, else the folder of a model.

    Raises:
        PluginError: ``examine`` and ``examine_config`` are both given.
    """

    name: str
    diagnose: Callable[[], Diagnosis]
    """Describe the engine on this machine."""
    examine: Callable[[Path, Recipe, int], Diagnosis] | None = None
    """Describe what the engine would do with a model (a folder with a ``config.json``), a recipe
    and a tensor parallel size, as ``sections`` and ``problems``. It may import the engine."""
    examine_config: Callable[[ConfigRequest], Diagnosis] | None = None
    """Describe what a run with a config of the engine would do, without starting it. What stops
    the run is in ``problems``; a ``Fp8RLError`` says why nothing can be told."""
    examine_environments: Callable[[Path | None], Diagnosis] | None = None
    """Describe fp8rl in all interpreters of the engine on this machine, given a checkout of the
    engine or None. An interpreter that lacks it is in ``problems``. It is the subcommand
    ``NAME-environments`` of the doctor."""
    recipe_of: Callable[[Path], Recipe] | None = None
    """Read the recipe of the rollouts from a config of the engine."""
    record_exact: Callable[[ExactRequest], None] | None = None
    """Sample from the prompts, and write down what each module took and gave. It starts the
    engine."""
    replay_exact: Callable[[ExactRequest], list[Compared]] | None = None
    """Give the modules of the trainer the inputs that were written down, in the order of the model;
    the last row is the log-probabilities of the sampled tokens, end to end."""

    def __post_init__(self) -> None:
        if self.examine is not None and self.examine_config is not None:
            raise PluginError(
                f"The adapter of engine '{self.name}' has examine and examine_config, but "
                f"'fp8rl doctor {self.name}' takes a model or a config; leave one out."
            )


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None, without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
