"""NeMo RL's driver with an environment that reasoning-gym scores.

    python benchmarks/nemo_rl_workers/reasoning_environment.py DRIVER ARGS...

NeMo RL's drivers know no environment but its own; ``register_env`` adds one in their process, after
which the driver's file runs untouched. Ray's workers import this module too, so this folder, and
not the one above with its ``nemo_rl.py``, must be on their ``PYTHONPATH``.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import ray
import reasoning_gym
import torch
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.math_environment import BaseMathEnvironment
from nemo_rl.environments.utils import register_env
from reasoning_gym.utils import extract_answer

NAME = "reasoning_gym"
ACTOR = "reasoning_environment.ReasoningEnvironment"


def score(response: str, known: str) -> float:
    """Return reasoning-gym's score of the last ``<answer>`` of a response, 0 without one.

    Args:
        response: text of the model.
        known: JSON with ``answer`` and ``metadata`` of the item.
    """
    entry = json.loads(known)
    scorer: Any = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(scorer(extract_answer(response), entry))


@ray.remote(max_restarts=-1, max_task_retries=-1)
class ReasoningEnvironment(BaseMathEnvironment):
    """An environment of one turn; its metrics are those of NeMo RL's for math."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg, self.workers = cfg, []  # without helpers: a score takes microseconds

    def step(
        self,
        message_log_batch: list[list[dict[str, Any]]],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[Any]:
        """Score the last message of each conversation."""
        told = [str(messages[-1]["content"]) for messages in message_log_batch]
        rewards = torch.tensor(
            [score(text, row["ground_truth"]) for text, row in zip(told, metadata, strict=True)]
        )
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": "Environment: " + ("correct" if x else "wrong")}
                for x in rewards == 1
            ],
            metadata=metadata,
            next_stop_strings=list(itertools.repeat(None, len(told))),
            rewards=rewards,
            terminateds=torch.ones_like(rewards),
            answers=[extract_answer(text) for text in told] if return_extracted_answer else None,
        )


def main(arguments: list[str]) -> None:
    """Register the environment and run a driver with its arguments."""
    registry.ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = PY_EXECUTABLES.SYSTEM
    register_env(NAME, ACTOR)
    driver = Path(arguments[0]).resolve()
    sys.argv = [str(driver), *arguments[1:]]
    sys.path.insert(0, str(driver.parent))  # as python does
    runpy.run_path(str(driver), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
