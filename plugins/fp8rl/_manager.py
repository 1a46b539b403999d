"""The plugin manager: entry points of group ``fp8rl``, loaded once, failures loud."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points

import pluggy

from fp8rl import hookspecs
from fp8rl.errors import PluginError
from fp8rl.gemm import GemmBackend, ReferenceBackend
from fp8rl.pinning import PinPolicy
from fp8rl.recipe import Pins

BLOCK_ENV = "FP8RL_BLOCK_PLUGINS"
"""Comma-separated entry-point names that are not loaded."""


class PluginManager(pluggy.PluginManager):
    """pluggy's manager with the contract of :mod:`fp8rl.hookspecs`.

    Args:
        discover: load the entry points of group ``fp8rl``; off for tests that register by hand.

    Raises:
        PluginError: an entry point cannot be imported or has an unknown or wrongly typed hook.
    """

    def __init__(self, *, discover: bool = True) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        if discover:
            self._discover()

    def _discover(self) -> None:
        blocked = {n.strip() for n in os.environ.get(BLOCK_ENV, "").split(",") if n.strip()}
        for point in sorted(entry_points(group=hookspecs.PROJECT), key=lambda p: p.name):
            if point.name in blocked or self.has_plugin(point.name):
                continue
            try:
                plugin = point.load()
                self.register(plugin, name=point.name)
                self.check_pending()
            except Exception as error:
                owner = point.dist.name if point.dist else "an unknown distribution"
                raise PluginError(
                    f"fp8rl plugin '{point.name}' ({point.value}, from {owner}) cannot be loaded: "
                    f"{type(error).__name__}: {error}. Repair or uninstall {owner}, or set "
                    f"{BLOCK_ENV}={point.name}."
                ) from error

    def pin_policy(self, pins: Pins, module_names: list[str]) -> PinPolicy:
        """The recipe's pins joined with those that plugins add, resolved for one model."""
        for extra in self.hook.register_pins(module_names=module_names):
            if extra is not None:
                pins = pins.merged(extra)
        return PinPolicy(pins, module_names)

    def gemm_backends(self) -> dict[str, GemmBackend]:
        """All backends by name; the reference backend is always there.

        Raises:
            PluginError: two backends have one name.
        """
        found: dict[str, GemmBackend] = {}
        for backend in [ReferenceBackend(), *self._flat(self.hook.register_gemm_backends())]:
            self._add(found, backend.name, backend, "GEMM backend")
        return found

    def is_correctors(self) -> dict[str, Callable]:
        """All importance-sampling correctors by name.

        Raises:
            PluginError: two correctors have one name.
        """
        found: dict[str, Callable] = {}
        for correctors in self.hook.register_is_correctors():
            for name, corrector in correctors.items():
                self._add(found, name, corrector, "importance-sampling corrector")
        return found

    def engine_adapters(self) -> list:
        """All engine adapters, sorted by name."""
        return sorted(self._flat(self.hook.register_engine_adapters()), key=lambda a: a.name)

    @staticmethod
    def _flat(results: list) -> list:
        return [item for result in results for item in result]

    @staticmethod
    def _add(found: dict, name: str, item: object, what: str) -> None:
        if name in found:
            raise PluginError(f"Two plugins offer a {what} named '{name}'; rename or block one.")
        found[name] = item
