"""Megatron workers: the model is converted to FP8 linears before it is wrapped.

Why: NeMo RL's FP8 training is Transformer Engine's, which cannot pin single layers from YAML and
whose codes are not the rollout engine's.
How: ``setup_model_and_optimizer`` takes pre-wrap hooks as an argument that nothing fills; ours is
added where ``policy.megatron_cfg.fp8rl`` asks for FP8 training, of a model that has an optimizer:
GRPO gives its frozen teachers the policy's section too, and they stay in BF16. Observers of q, k
and v are put on the finished model where the rollouts have an FP8 KV cache.
Upstream: ``nemo_rl/models/megatron/setup.py``.
Goes: when ``policy.megatron_cfg`` takes pre-wrap hooks.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from nemo_rl_ext.patches.ledger import Seams
from nemo_rl_ext.patches.upstream import Upstream, resolve

UPSTREAM = (
    Upstream(
        "nemo_rl.models.megatron.setup",
        "setup_model_and_optimizer",
        (
            "policy_cfg",
            "megatron_cfg",
            "load_optimizer",
            "get_embedding_ranks",
            "get_position_embedding_ranks",
            "pre_load_checkpoint_hook",
            "additional_pre_wrap_hooks",
            "load_weights",
        ),
    ),
)


def apply(module: ModuleType, seams: Seams) -> None:
    setup = resolve(module, UPSTREAM[0])

    @functools.wraps(setup)
    def converting(*args: Any, **kwargs: Any) -> Any:
        from nemo_rl_ext.workers import training

        given = inspect.signature(setup).bind(*args, **kwargs)
        given.apply_defaults()
        policy = given.arguments["policy_cfg"]
        recipe = training.recipe_of(policy)
        if recipe is None or not given.arguments["load_optimizer"]:
            return setup(*args, **kwargs)
        seams.require(training.KEY)
        if recipe.training:
            hooks = given.arguments["additional_pre_wrap_hooks"] or ()
            given.arguments["additional_pre_wrap_hooks"] = [
                *hooks,
                training.pre_wrap_hook(recipe),
            ]
        state = setup(*given.args, **given.kwargs)
        if training.sends_kv_scales(policy):
            training.observe(state.model)
        return state

    setattr(module, UPSTREAM[0].name, converting)
