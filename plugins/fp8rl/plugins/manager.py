"""The plugin manager: it loads the entry points of group ``fp8rl`` and reports failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeVar

import pluggy

from fp8rl.errors import Fp8RLError, PluginError, RecipeError
from fp8rl.models.pins import PinPolicy
from fp8rl.plugins import hookspecs
from fp8rl.recipe import Pins

if TYPE_CHECKING:
    from fp8rl.gemm import GemmBackend
    from fp8rl.plugins.adapters import EngineAdapter

BLOCK_ENV = "FP8RL_BLOCK_PLUGINS"
"""Comma-separated entry-point names that are not loaded."""

T = TypeVar("T")


class PluginManager(pluggy.PluginManager):
    """pluggy's manager with the contract of :mod:`fp8rl.plugins.hookspecs`.

    Args:
        discover: load the entry points of group ``fp8rl``; tests that register by hand switch it
            off.
        strict: raise if a plugin cannot be loaded; otherwise :attr:`broken` holds the errors, for
            a command line that must still say which plugin it is.

    Raises:
        PluginError: an entry point cannot be imported, has an unknown or wrongly typed hook, or has
            the name of another one.
    """

    def __init__(self, *, discover: bool = True, strict: bool = True) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        self.entry_points: dict[str, EntryPoint] = {}
        """Every entry point found and not blocked, loadable or not."""
        self.broken: dict[str, PluginError] = {}
        if discover:
            self._discover(strict)

    def _discover(self, strict: bool) -> None:
        blocked = {n.strip() for n in os.environ.get(BLOCK_ENV, "").split(",") if n.strip()}
        for point in sorted(entry_points(group=hookspecs.PROJECT), key=lambda p: p.name):
            # One distribution may be found twice, e.g. as a checkout and as its installation.
            known = self.entry_points.get(point.name)
            if point.name in blocked or (known and known.value == point.value):
                continue
            try:
                if known:
                    raise PluginError(
                        f"Two fp8rl plugins are named '{point.name}' ({_origin(known)}; "
                        f"{_origin(point)}); uninstall one."
                    )
                self.entry_points[point.name] = point
                self._load(point)
            except PluginError as error:
                if strict:
                    raise
                self.broken[point.name] = error

    def _load(self, point: EntryPoint) -> None:
        try:
            self.register(point.load(), name=point.name)
            self.check_pending()
        except Exception as error:
            if self.has_plugin(point.name):
                self.unregister(name=point.name)
            raise PluginError(
                f"fp8rl plugin '{point.name}' ({_origin(point)}) cannot be loaded: "
                f"{type(error).__name__}: {error}. Repair or uninstall it, or set "
                f"{BLOCK_ENV}={point.name}."
            ) from error

    def pin_policy(self, pins: Pins, module_names: Sequence[str]) -> PinPolicy:
        """Resolve the recipe's pins, together with the pins of plugins, for one model.

        Raises:
            PinError: see :class:`PinPolicy`.
            PluginError: a plugin failed, or returned something other than Pins.
        """
        # A tuple: a plugin that empties a list would take the names from the user's pins too.
        for extra in self._called("register_pins", module_names=tuple(module_names)):
            if not isinstance(extra, Pins):
                raise self._contract_error("register_pins", "Pins or None", extra)
            pins = pins.merged(extra)
        return PinPolicy(pins, module_names)

    def gemm_backends(self) -> dict[str, GemmBackend]:
        """Return all backends by name, built-in ones and plugins'.

        Raises:
            PluginError: two backends have one name.
        """
        from fp8rl.gemm import builtin_backends  # imports torch, which the CLI does not need

        offered = self._flat("register_gemm_backends")
        return self._by_name(
            "GEMM backend", ((backend.name, backend) for backend in [*builtin_backends(), *offered])
        )

    def is_correctors(self) -> dict[str, Callable]:
        """Return all importance-sampling correctors by name.

        Raises:
            PluginError: two correctors have one name.
        """
        mappings = self._called("register_is_correctors")
        for mapping in mappings:
            if not isinstance(mapping, Mapping):
                raise self._contract_error("register_is_correctors", "a mapping", mapping)
        return self._by_name(
            "importance-sampling corrector", (item for found in mappings for item in found.items())
        )

    def is_corrector(self, name: str) -> Callable:
        """Return the corrector that ``importance_sampling.corrector`` names.

        Raises:
            RecipeError: no plugin offers the name.
            PluginError: two correctors have one name.
        """
        found = self.is_correctors()
        if name not in found:
            raise RecipeError(
                f"importance_sampling.corrector '{name}' is not known; use one of "
                f"{', '.join(sorted(found)) or 'none'}, or install the plugin that offers it."
            )
        return found[name]

    def engine_adapters(self) -> list[EngineAdapter]:
        """Return all engine adapters, sorted by name."""
        adapters = self._flat("register_engine_adapters")
        return sorted(adapters, key=lambda adapter: adapter.name)

    def _called(self, hook: str, **arguments: object) -> list:
        """Return the results of all plugins with a hook; an error of one is a PluginError."""
        try:
            return list(getattr(self.hook, hook)(**arguments))
        except Fp8RLError:
            raise
        except Exception as error:
            raise PluginError(
                f"{hook} of an fp8rl plugin (one of: {self._plugins_with(hook)}) failed: "
                f"{type(error).__name__}: {error}. Repair the plugin, or leave it out with "
                f"{BLOCK_ENV}."
            ) from error

    def _plugins_with(self, hook: str) -> str:
        return ", ".join(impl.plugin_name for impl in getattr(self.hook, hook).get_hookimpls())

    def _flat(self, hook: str) -> list:
        results = self._called(hook)
        for result in results:
            if not isinstance(result, (list, tuple)):
                raise self._contract_error(hook, "a list", result)
        return [item for result in results for item in result]

    def _contract_error(self, hook: str, expected: str, got: object) -> PluginError:
        return PluginError(
            f"{hook} of an fp8rl plugin (one of: {self._plugins_with(hook)}) returned "
            f"{type(got).__name__}; it must return {expected}."
        )

    @staticmethod
    def _by_name(what: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
        found: dict[str, T] = {}
        for name, item in items:
            if name in found:
                raise PluginError(
                    f"Two plugins offer a {what} named '{name}'; rename or block one."
                )
            found[name] = item
        return found


def _origin(point: EntryPoint) -> str:
    return f"{point.value}, from {point.dist.name if point.dist else 'an unknown distribution'}"
