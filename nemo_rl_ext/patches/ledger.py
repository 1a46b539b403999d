"""`Seams`: hooks that run when one of a closed list of NeMo RL's modules has been imported.

Torch is imported in the middle of ``nemo_rl.algorithms.grpo``: a module that is half imported when
the hooks are installed waits for :meth:`Seams.complete`, which the first seam that runs calls.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from nemo_rl_ext.driver.batch_correction import Run

SEAMS: dict[str, tuple[str, ...]] = {
    "nemo_rl.algorithms.distillation": ("config",),
    "nemo_rl.algorithms.dpo": ("config",),
    "nemo_rl.algorithms.grpo": ("config", "batch", "fallback"),
    "nemo_rl.algorithms.loss.loss_functions": ("loss",),
    "nemo_rl.algorithms.ppo": ("config",),
    "nemo_rl.algorithms.rm": ("config",),
    "nemo_rl.algorithms.sft": ("config",),
    "nemo_rl.algorithms.single_controller_utils.config": ("config",),
    "nemo_rl.algorithms.xtoken_off_policy_distillation": ("config",),
    "nemo_rl.distributed.virtual_cluster": ("start",),
    "nemo_rl.evals.eval": ("config",),
    "nemo_rl.models.generation.vllm.vllm_backend": ("refit",),
    "nemo_rl.models.generation.vllm.vllm_worker": ("rollout_engine",),
    "nemo_rl.models.generation.vllm.vllm_worker_async": ("rollout_engine",),
    "nemo_rl.models.megatron.router_replay": ("kv_cache",),
    "nemo_rl.models.megatron.setup": ("megatron",),
    "nemo_rl.models.policy.lm_policy": ("skip_step",),
    "nemo_rl.models.policy.tq_policy": ("skip_step",),
    "nemo_rl.models.policy.workers.megatron_policy_worker": ("kv_scales",),
    "nemo_rl.utils.config": ("start",),
    "nemo_rl.weight_sync.collective_weight_synchronizer": ("fallback",),
    "nemo_rl.weight_sync.ipc_weight_synchronizer": ("fallback",),
}
"""Upstream module -> the modules of :mod:`nemo_rl_ext.patches` that act on it."""

LATER = (
    "nemo_rl.models.generation.vllm.vllm_backend",
    "nemo_rl.models.generation.vllm.vllm_worker_async",
    "nemo_rl.models.megatron.setup",
    "nemo_rl.models.policy.workers.megatron_policy_worker",
    "nemo_rl.weight_sync.collective_weight_synchronizer",
    "nemo_rl.weight_sync.ipc_weight_synchronizer",
)
"""Those that a driver imports after its config is read, or never; it reads their source."""


class Seams:
    """A finder for ``sys.meta_path``, and what this process knows of its run.

    It answers for the modules of :data:`SEAMS` only, and finds them with the finders behind it.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        """Of the process that corrects batches; made with the loss."""
        self.unread: Any = None
        """The config that was loaded, until a class that knows our keys has been made of one."""
        self.applied: set[tuple[str, str]] = set()
        self.failures: dict[tuple[str, str], Exception] = {}
        self._half_imported: list[ModuleType] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in SEAMS:
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
        """Put the seams of a module in; an error waits for :meth:`require`."""
        for seam in SEAMS[module.__name__]:
            key = (module.__name__, seam)
            if key in self.applied:
                continue
            try:
                importlib.import_module(f"nemo_rl_ext.patches.{seam}").apply(module, self)
            except Exception as error:  # a run without our keys must not notice
                self.failures[key] = error
            else:
                self.applied.add(key)
                self.failures.pop(key, None)

    def complete(self) -> None:
        """Take up modules that were half imported when the hooks were installed."""
        waiting, self._half_imported = self._half_imported, []
        for module in waiting:
            if _initializing(module):
                self._half_imported.append(module)
            else:
                self.imported(module)

    def require(self, key: str) -> None:
        """Raise unless every seam met so far is in place, and those of the workers will fit.

        Args:
            key: full path of the config key that asks for fp8rl.

        Raises:
            UnsupportedError: a seam could not or will not go in, with the reason.
        """
        self.complete()
        self._read_later()
        if not self.failures:
            return
        from fp8rl.errors import UnsupportedError

        (module, seam), error = next(iter(self.failures.items()))
        raise UnsupportedError(
            f"'{key}' is set, but fp8rl's seam '{seam}' does not fit {module}: {error} Install the "
            "NeMo RL that docs/nemo_rl.md names, or remove the key."
        ) from error

    def _read_later(self) -> None:
        package = sys.modules.get("nemo_rl")
        if package is None:
            return
        from nemo_rl_ext.patches.upstream import compare_source

        for module in LATER:
            if module in sys.modules:
                continue
            for seam in SEAMS[module]:
                try:
                    for upstream in importlib.import_module(f"nemo_rl_ext.patches.{seam}").UPSTREAM:
                        compare_source(package.__path__[0], upstream)
                except Exception as error:  # told by require, like the others
                    self.failures.setdefault((module, seam), error)

    def take_up(self) -> None:
        """Look at modules imported before the hooks were installed."""
        for name in SEAMS:
            module = sys.modules.get(name)
            if module is None:
                continue
            if _initializing(module):
                self._half_imported.append(module)
            else:
                self.imported(module)


class _Loader:
    """A loader that tells when its module has been executed."""

    def __init__(self, loader: Any, seams: Seams) -> None:
        self._loader = loader
        self._seams = seams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._seams.imported(module)


def _initializing(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def installed() -> Seams | None:
    """The hooks of this process, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Seams)), None)


def install() -> Seams:
    """Install the hooks, once per process."""
    seams = installed()
    if seams is None:
        seams = Seams()
        sys.meta_path.insert(0, seams)  # type: ignore[arg-type]
        seams.take_up()
    return seams
