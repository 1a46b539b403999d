"""`PatchFinder` applies the patches of a closed list of NeMo RL's modules when they are imported.

Torch's autoload installs it in every process that imports torch, so this module must be quick to
import. Torch is imported in the middle of ``nemo_rl.algorithms.grpo``: a module that is half
imported when the finder is installed waits for :meth:`PatchFinder.take_up`, and so does one that
has been imported anew past the finder.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from nemo_rl_ext.driver.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PATCHES: dict[str, tuple[str, ...]] = {
    "nemo_rl.algorithms.distillation": ("config",),
    "nemo_rl.algorithms.dpo": ("config",),
    "nemo_rl.algorithms.grpo": ("config", "batch_correction"),
    "nemo_rl.algorithms.loss.loss_functions": ("loss",),
    "nemo_rl.algorithms.ppo": ("config",),
    "nemo_rl.algorithms.sft": ("config",),
    "nemo_rl.algorithms.single_controller_utils.config": ("config",),
    "nemo_rl.distributed.virtual_cluster": ("start",),
    "nemo_rl.models.generation.vllm.vllm_generation": ("worker_classes",),
    "nemo_rl.models.megatron.router_replay": ("kv_cache",),
    "nemo_rl.models.policy.lm_policy": ("skip_step", "worker_classes", "kv_scales"),
    "nemo_rl.models.policy.tq_policy": ("skip_step",),
    "nemo_rl.utils.config": ("start",),
    "nemo_rl.utils.logger": ("step_finished",),
}
"""Upstream module -> the modules of :mod:`nemo_rl_ext.patches` that change it."""


class PatchFinder:
    """A finder for ``sys.meta_path`` that applies :data:`PATCHES`, and the state of the run.

    It answers only for the modules of :data:`PATCHES`, and finds them with the other finders.
    """

    def __init__(self) -> None:
        self.run = RunState()
        self.applied: set[tuple[str, str]] = set()
        self.failures: dict[tuple[str, str], Exception] = {}
        self._seen: dict[str, tuple[ModuleType, Any]] = {}
        """Of each module's last execution, the module and its spec: a reload makes a new spec, a
        new import both."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def imported(self, module: ModuleType) -> None:
        """Apply the patches of a module that has just been executed, for the first time or again.

        An error waits for :func:`nemo_rl_ext.patches.upstream.require_patches`.
        """
        self._seen[module.__name__] = (module, getattr(module, "__spec__", None))
        for patch in PATCHES[module.__name__]:
            key = (module.__name__, patch)
            try:
                module_of(patch).apply(module, self)
            except Exception as error:  # a run without our keys must not notice
                self.failures[key] = error
                self.applied.discard(key)
            else:
                self.applied.add(key)
                self.failures.pop(key, None)

    def take_up(self) -> None:
        """Patch modules that were executed without :meth:`imported`: before the finder was
        installed, or by another finder."""
        for name in PATCHES:
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is None or getattr(spec, "_initializing", False):
                continue
            patched, its_spec = self._seen.get(name, (None, None))
            if module is not patched or spec is not its_spec:
                self.imported(module)


class _Loader:
    """A loader that tells the finder when its module has been executed."""

    def __init__(self, loader: Any, finder: PatchFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.imported(module)


def module_of(patch: str) -> Any:
    """Import the module of a patch."""
    return importlib.import_module(f"nemo_rl_ext.patches.{patch}")


def installed() -> PatchFinder | None:
    """Return the finder of this process, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, PatchFinder)), None)


def install() -> PatchFinder:
    """Install the finder, once per process."""
    finder = installed()
    if finder is None:
        finder = PatchFinder()
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
        finder.take_up()
    return finder
