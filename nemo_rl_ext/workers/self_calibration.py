"""`CalibratingLLM`: an engine that calibrates its KV scales where its trainer has sent none."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import wrapt

from fp8rl.errors import ScaleError
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

SEQUENCES = 64
"""Largest number of sequences per calibration, taken evenly from a rollout."""
TOKENS = 32768
"""Largest number of tokens per calibration, unless the first sequence is longer."""

_Tokens = tuple[int, ...]


class CalibratingLLM(wrapt.ObjectProxy):
    """An ``LLM`` whose ``generate`` calibrates first where the engine lacks KV scales.

    A refit that brings no scales removes the old ones (:mod:`nemo_rl_ext.workers.refit`), so there
    is one calibration for each such refit, with the KV cache awake: over sequences of the latest
    rollouts, prompts and responses, or, before the first, over the prompts given.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        # wrapt stores attributes with this prefix in the proxy.
        self._self_seen: deque[_Tokens] = deque(maxlen=SEQUENCES)
        self._self_scales: dict[str, float] = {}

    def generate(self, prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """``LLM.generate`` of prompts as NeMo RL gives them: dicts with ``prompt_token_ids``.

        Raises:
            ScaleError: the scales are missing and the calibration failed; nothing is generated.
        """
        from vllm_fp8rl.calibration import lacks_kv_scales

        if lacks_kv_scales(self.__wrapped__):
            self._calibrate(prompts)
        outputs = self.__wrapped__.generate(prompts, *args, **kwargs)
        limit = self.__wrapped__.llm_engine.model_config.max_model_len - 1  # room for one token
        sequences = [(*o.prompt_token_ids, *o.outputs[0].token_ids)[:limit] for o in outputs]
        self._self_seen.extend(_spread(sequences))
        return outputs

    def _calibrate(self, prompts: Sequence[Any]) -> None:
        from vllm_fp8rl.calibration import calibrate_kv_scales

        started = time.perf_counter()
        sequences = list(reversed(self._self_seen))
        chosen = _within_budget(sequences or _spread(p["prompt_token_ids"] for p in prompts))
        try:
            self._self_scales = calibrate_kv_scales(
                self.__wrapped__, chosen, start=self._self_scales
            )
        except Exception as error:
            raise ScaleError(
                "vLLM could not calibrate its KV scales after a refit that brought none "
                f"({type(error).__name__}: {error}); if that cannot be helped, set "
                "'policy.generation.vllm_cfg.fp8rl.kv_cache.dtype' to auto."
            ) from error
        ordered = sorted(self._self_scales.items(), key=lambda item: item[1])
        logger.info(
            "fp8rl: KV scales calibrated from %d %s (%d tokens) in %.2f s: %s",
            len(chosen),
            "sequences of the latest rollouts" if sequences else "prompts",
            sum(map(len, chosen)),
            time.perf_counter() - started,
            ", ".join(f"{name} {scale:.6g}" for name, scale in (ordered[0], ordered[-1])),
        )


def _spread(prompts: Iterable[Sequence[int]]) -> list[_Tokens]:
    """Choose at most ``SEQUENCES`` distinct prompts, evenly from the whole list."""
    kept = list(dict.fromkeys(map(tuple, prompts)))
    return kept[:: -(-len(kept) // SEQUENCES) or 1]


def _within_budget(prompts: Iterable[_Tokens]) -> list[_Tokens]:
    chosen: list[_Tokens] = []
    total = 0
    for prompt in prompts:
        total += len(prompt)
        if chosen and total > TOKENS:
            break
        chosen.append(prompt)
    return chosen
