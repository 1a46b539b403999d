"""``load_config`` and ``init_ray``, which every driver calls before it makes its workers.

Why: ``run_grpo.py`` imports ``nemo_rl.algorithms.grpo``, which imports torch, which installs the
finder in the middle of that import; nothing tells when it ends. And a driver whose config is of a
class we do not know would ignore our keys.
How: wraps ``load_config``, which every driver calls before it makes its ``MasterConfig``, and
``init_ray``, which refuses keys that no such class has seen.
Upstream: ``nemo_rl/utils/config.py``, ``nemo_rl/distributed/virtual_cluster.py``.
Until: NeMo RL calls plugins by an entry point of its own.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

UPSTREAM = (
    Upstream("nemo_rl.utils.config", "load_config", "config_path"),
    Upstream("nemo_rl.distributed.virtual_cluster", "init_ray", ""),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    function = resolve(module, upstream)

    @functools.wraps(function)
    def completing(*args: Any, **kwargs: Any) -> Any:
        finder.take_up()
        finder.run.unread_config = function(*args, **kwargs)  # command lines change it in place
        return finder.run.unread_config

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if finder.run.unread_config is not None:
            from nemo_rl_ext.config.drivers import refuse_unread

            refuse_unread(finder.run.unread_config)
        return function(*args, **kwargs)

    wrapper = completing if upstream.name == "load_config" else checking
    setattr(module, upstream.name, wrapper)
