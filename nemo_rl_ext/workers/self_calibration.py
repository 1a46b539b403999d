"""`CalibratingLLM`: an engine that calibrates its KV scales where its trainer has sent none."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import wrapt

from fp8rl.errors import ScaleError
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

SEQUENCES = 64
"""Largest number of sequences per calibration, taken evenly from a rollout."""
TOKENS = 32768
"""Largest number of tokens per calibration, unless the first sequence is longer."""

_Prompt = str | tuple[int, ...] | Mapping[str, Any]


class CalibratingLLM(wrapt.ObjectProxy):
    """An ``LLM`` whose ``generate`` calibrates first where the engine lacks KV scales.

    A refit that brings no scales removes the old ones (:mod:`nemo_rl_ext.workers.refit`), so there
    is one calibration for each such refit, with the KV cache awake: over sequences of the latest
    rollouts, prompts and responses, or, before the first, over the prompts given.

    Args:
        llm: a synchronous engine with ``quantization="fp8rl"`` and an FP8 KV cache.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        # wrapt stores attributes with this prefix in the proxy.
        self._self_seen: deque[_Prompt] = deque(maxlen=SEQUENCES)
        self._self_scales: dict[str, float] = {}

    def generate(self, prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """``LLM.generate`` of a list of prompts.

        Raises:
            ScaleError: the scales are missing and the calibration failed; nothing is generated.
        """
        from vllm_fp8rl.calibration.calibrate import lacks_kv_scales

        if lacks_kv_scales(self.__wrapped__):
            self._calibrate(prompts)
        outputs = self.__wrapped__.generate(prompts, *args, **kwargs)
        self._remember(prompts, outputs)
        return outputs

    def _calibrate(self, prompts: Sequence[Any]) -> None:
        from vllm_fp8rl.calibration.calibrate import calibrate_kv_scales

        started = time.perf_counter()
        chosen = _within_budget(reversed(self._self_seen) if self._self_seen else _spread(prompts))
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
            "sequences of the latest rollouts" if self._self_seen else "prompts",
            sum(map(_length, chosen)),
            time.perf_counter() - started,
            ", ".join(f"{name} {scale:.6g}" for name, scale in (ordered[0], ordered[-1])),
        )

    def _remember(self, prompts: Sequence[Any], outputs: Sequence[Any]) -> None:
        limit = self.__wrapped__.llm_engine.model_config.max_model_len - 1  # room for one token
        sequences = [
            (*output.prompt_token_ids, *output.outputs[0].token_ids)[:limit]
            for prompt, output in zip(prompts, outputs, strict=True)
            if not _is_more(prompt)  # the tokens of media mean nothing without the media
        ]
        self._self_seen.extend(_spread(sequences))


def _spread(prompts: Iterable[Any]) -> list[_Prompt]:
    """Choose at most ``SEQUENCES`` distinct prompts, evenly from the whole list."""
    plain = [_plain(prompt) for prompt in prompts]
    kept = list({id(p) if isinstance(p, Mapping) else p: p for p in plain}.values())
    return kept[:: -(-len(kept) // SEQUENCES) or 1]


def _within_budget(prompts: Iterable[_Prompt]) -> list[_Prompt]:
    chosen: list[_Prompt] = []
    total = 0
    for prompt in prompts:
        total += _length(prompt)
        if chosen and total > TOKENS:
            break
        chosen.append(prompt)
    return chosen


def _plain(prompt: Any) -> _Prompt:
    """Return token ids as a tuple; text and multimodal prompts unchanged."""
    if isinstance(prompt, str) or _is_more(prompt):
        return prompt
    return tuple(prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt)


def _is_more(prompt: Any) -> bool:
    """Whether a prompt holds text or media, not token ids alone."""
    return isinstance(prompt, Mapping) and (
        "prompt_token_ids" not in prompt or bool(prompt.get("multi_modal_data"))
    )


def _length(prompt: _Prompt) -> int:
    """Number of tokens; for text its characters, which are at least as many."""
    if isinstance(prompt, Mapping):
        return len(prompt.get("prompt_token_ids") or prompt.get("prompt") or ())
    return len(prompt)
