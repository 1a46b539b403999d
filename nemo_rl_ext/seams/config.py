"""``MasterConfig``: our keys are read, checked and spread before Ray is started.

Why: unknown keys pass NeMo RL's config unseen, and its own FP8 keys lead into its own FP8 code.
How: a constructor around the constructor of the class itself, so that it does not matter who has
imported the class already; :mod:`nemo_rl_ext.config_keys` has the rules.
Upstream: ``nemo_rl/algorithms/{grpo,ppo}.py``,
``nemo_rl/algorithms/single_controller_utils/config.py``.
Goes: when NeMo RL validates and hands out plugins' sections.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from nemo_rl_ext.activation import Seams
from nemo_rl_ext.seams.upstream import Upstream, resolve

UPSTREAM = tuple(
    Upstream(module, "MasterConfig")
    for module in (
        "nemo_rl.algorithms.grpo",
        "nemo_rl.algorithms.ppo",
        "nemo_rl.algorithms.single_controller_utils.config",
    )
)
DRIVERS = {
    "nemo_rl.algorithms.grpo": "grpo",
    "nemo_rl.algorithms.ppo": "ppo",
    "nemo_rl.algorithms.single_controller_utils.config": "single_controller",
}


def apply(module: ModuleType, seams: Seams) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    master_config = resolve(module, upstream)
    driver = DRIVERS[module.__name__]
    construct = master_config.__init__

    def __init__(self: Any, /, **data: Any) -> None:
        construct(self, **data)
        from nemo_rl_ext.config_keys import prepare

        prepare(self, driver, seams.require)

    master_config.__init__ = __init__
