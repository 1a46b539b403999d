"""``vllm_cfg.kv_cache_dtype`` becomes ``fp8`` once the driver's guards have been passed.

Why: the driver asks the key whether to send KV scales, and its guards tie the key to
``precision: fp8``, which is upstream's own FP8 path. Our guards have run by then
(:mod:`nemo_rl_ext.config.checks`).
How: wraps ``configure_vllm_for_router_replay``, which ``grpo.setup`` and the single controller call
between their guards and the making of workers.
Upstream: ``nemo_rl/models/megatron/router_replay.py``.
Until: ``kv_cache_dtype: fp8`` no longer asks for ``precision: fp8``.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

UPSTREAM = (
    Upstream("nemo_rl.models.megatron.router_replay", "configure_vllm_for_router_replay", "config"),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    configure = resolve(module, UPSTREAM[0])

    @functools.wraps(configure)
    def announcing(*args: Any, **kwargs: Any) -> Any:
        from nemo_rl_ext.config.upstream import announce_kv_scales

        result = configure(*args, **kwargs)
        announce_kv_scales(kwargs["config"] if "config" in kwargs else args[0])
        return result

    setattr(module, UPSTREAM[0].name, announcing)
