"""Drivers' ``load_config``: the moment at which half-imported modules are whole.

Why: ``run_grpo.py`` imports ``nemo_rl.algorithms.grpo``, which imports torch, which installs our
hooks in the middle of that import; nothing tells when it ends.
How: wraps ``load_config``, which every driver calls before it makes its ``MasterConfig``.
Upstream: ``nemo_rl/utils/config.py``.
Goes: when NeMo RL calls plugins by an entry point of its own.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.activation import Seams
from nemo_rl_ext.seams.upstream import Upstream, resolve

UPSTREAM = (Upstream("nemo_rl.utils.config", "load_config", ("config_path",)),)


def apply(module: ModuleType, seams: Seams) -> None:
    load_config = resolve(module, UPSTREAM[0])

    @functools.wraps(load_config)
    def completing(*args: Any, **kwargs: Any) -> Any:
        seams.complete()
        return load_config(*args, **kwargs)

    module.load_config = completing  # type: ignore[attr-defined]
