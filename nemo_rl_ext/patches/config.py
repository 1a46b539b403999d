"""``MasterConfig``: our keys are read, checked and merged before Ray is started.

Why: NeMo RL's config accepts and ignores unknown keys; its own FP8 keys select its own FP8 code.
How: wraps the constructor of each driver's class, so that it does not matter who has imported the
class already; :mod:`nemo_rl_ext.config.drivers` says what a driver serves, and
:mod:`nemo_rl_ext.config.upstream`, imported only where there is a key, makes the plan.
Upstream: the modules of :data:`nemo_rl_ext.config.drivers.DRIVERS`.
Until: NeMo RL validates and hands out plugins' sections.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.config.drivers import DRIVERS, check_places
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, require_patches, resolve

UPSTREAM = tuple(Upstream(driver.module, "MasterConfig") for driver in DRIVERS.values())


def apply(module: ModuleType, finder: PatchFinder) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    master_config = resolve(module, upstream)
    driver = next(d for d in DRIVERS.values() if d.module == module.__name__)
    construct = master_config.__init__

    def __init__(self: Any, /, **data: Any) -> None:
        finder.run.unread_config = finder.run.plan = None
        asked = check_places(data, driver)  # of all that is given, whatever the class keeps
        construct(self, **data)
        if asked:
            from nemo_rl_ext.config.upstream import prepare

            finder.run.plan = prepare(self, driver, functools.partial(require_patches, finder))

    master_config.__init__ = __init__
