"""Any submodule of a package that is only imported; see ``any_name.py``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from any_name import stand_in


class _AnyModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        return stand_in(name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str, missing: Collection[str]) -> None:
        self._package, self._missing = package, missing

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, part = name.partition(".")
        if package != self._package or part.rpartition(".")[2] in self._missing:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def has_any_module(package: str, *, missing: Collection[str] = ()) -> None:
    """Let a package have submodules of any name, but those that are ``missing`` or are files."""
    sys.meta_path.append(_Finder(package, missing))  # after the finder of files
