"""An fp8rl plugin: one more pin, an importance-sampling corrector, a log of training steps."""

import json
import os
from dataclasses import replace
from pathlib import Path

from fp8rl import hookimpl
from fp8rl.recipe import Pins


@hookimpl
def register_pins(module_names):
    """Keep every down_proj of the first layer in BF16, in training and in rollout."""
    first = [n for n in module_names if n.startswith("model.layers.0.") and n.endswith("down_proj")]
    return Pins(names=tuple(first))


@hookimpl
def register_is_correctors():
    """Chosen by ``importance_sampling: {corrector: sqrt}`` in the recipe."""
    return {"sqrt": sqrt_correct}


def sqrt_correct(rollout_logprobs, trainer_logprobs, mask, config):
    """Square roots of the built-in weights: half the correction, with less variance."""
    # Imported here, because every command imports a hook module.
    from nemo_rl_ext.grpo.importance_sampling import correct_is

    found = correct_is(rollout_logprobs, trainer_logprobs, mask, config)
    return replace(found, weights=found.weights.sqrt())


@hookimpl
def step_finished(step, metrics):
    """Append the step to a JSONL file."""
    path = Path(os.environ.get("EXAMPLE_STEPS_FILE", "steps.jsonl"))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")
