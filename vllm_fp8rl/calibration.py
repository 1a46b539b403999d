"""KV scales of an engine without a trainer: calibrated from prompts, sent by name, or set by hand.

Calibrating and sending empty the prefix cache, whose blocks hold codes of the old scales. With an
``AsyncLLM`` without requests in flight call the step by name:
``await engine.collective_rpc("fp8rl_set_kv_scales", args=(scales,))``, then
``await engine.reset_prefix_cache()``; the engine refuses to run in between.

Importing this module does not import vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fp8rl.errors import RefitError, ScaleError
from fp8rl.kv_scales import ROLES, parse_scale_name, scale_name, scales_from_amax
from vllm_fp8rl.kv.scales import by_place, fp8_layers, set_kv_scales
from vllm_fp8rl.refit.sender.client import (
    Changes,
    RequestGate,
    Workers,
    admitted,
    drop_requests,
    forget_prefixes,
    require_idle,
)

if TYPE_CHECKING:
    from vllm import LLM

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token numbers, or vLLM's dict of either."""

_PASSES = 2
"""The first runs with scale 1, the second with what the first found, which is as in service."""
_MOST_PASSES = 5
_COVERED = 1 + 1 / 16
"""Values up to this factor beyond a scale's range lose no more than rounding does anyway."""
_OLD_CODES = "codes of the old KV scales"
_NO_FP8_CACHE = (
    "The model has no FP8 KV cache to scale; start the engine with kv_cache_dtype='fp8'. "
    "An INT8 or BF16 cache needs no scales."
)
_REMEDY = "calibrate again, send KV scales, or refit the engine"


def send_kv_scales(llm: LLM, scales: Mapping[str, float]) -> None:
    """Set scales on every worker, in effect from the next step, and empty the prefix cache.

    Args:
        llm: an idle engine started with ``quantization="fp8rl"`` and an FP8 KV cache.
        scales: see :func:`vllm_fp8rl.kv.scales.set_kv_scales`.

    Raises:
        ScaleError: an unknown name, two names of one scale, or a bad value; nothing is set.
        RefitError: requests are in flight, another thread is changing the engine, or the prefix
            cache cannot be emptied; then the engine refuses to run until it has been.
        UnsupportedError: see :func:`vllm_fp8rl.refit.refit`.
    """
    workers = Workers(llm)
    values = _named(scales, "KV scales")

    def change() -> None:
        require_idle(llm)
        workers.call("fp8rl_set_kv_scales", values)
        forget_prefixes(llm, _OLD_CODES)

    def undo(reason: str) -> None:
        with contextlib.suppress(RefitError):  # then the workers' guards stay closed
            forget_prefixes(llm, _OLD_CODES)

    Changes.of(llm.llm_engine).run(change, undo)


def _named(scales: Mapping[str, float], what: str) -> dict[str, float]:
    """Checked scales, each by the name that it has in answers of the workers."""
    return {scale_name(*place): value for place, value in by_place(scales, what).items()}


def lacks_kv_scales(llm: LLM) -> bool:
    """Tell whether a worker has an FP8 KV cache without all the scales that generation needs."""
    return any(Workers(llm).call("fp8rl_missing_kv_scales"))


def set_uncalibrated_kv_scales(model: torch.nn.Module, value: float) -> None:
    """Give every layer and role the same scale, knowingly, without calibration.

    For a standalone engine whose checkpoint has no scales and that gets no refit. ``value * 448``
    is the largest magnitude that K and V can have without being clipped: 0.05 suits the RMS-normed
    keys of a Qwen3. ``llm.apply_model(functools.partial(set_uncalibrated_kv_scales, value=0.05))``
    reaches every worker; with engine processes it needs ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.

    Raises:
        ScaleError: the model has no FP8 KV cache, or a bad value.
    """
    indices = [scales.index for _, scales in fp8_layers(model)]
    if not indices:
        raise ScaleError(_NO_FP8_CACHE)
    set_kv_scales(model, {scale_name(i, role): value for i in indices for role in ROLES})


def calibrate_kv_scales(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    margin: float | None = None,
    start: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Set scales from the largest magnitudes that the engine's own weights make of prompts.

    The prompts run twice, as prompts only: give whole conversations, responses included, such as
    the engine will see. This works with eager engines, with those whose prompts run outside full
    CUDA graphs (vLLM's default), and with any tensor parallel size. Meanwhile the engine takes no
    other requests. If it fails, the scales from before stay.

    Args:
        llm: an idle engine started with ``quantization="fp8rl"`` and an FP8 KV cache.
        prompts: text, token numbers, or vLLM's dicts of either; of at least two tokens each, and
            short enough for one more.
        margin: factor on the magnitudes; the recipe's ``kv_cache.margin`` by default.
        start: scales of weights that differ little from these, such as those of the last
            calibration; then one run is enough, unless it clips.

    Returns:
        The scales by their names on the wire, see :func:`fp8rl.kv_scales.scales_from_amax`. Those
        of queries that are seen only quantized are up to 7% larger.

    Raises:
        ScaleError: no FP8 KV cache, a bad margin, bad scales to start from, or prompts that
            show nothing of a layer.
        RefitError: requests are in flight, or the weights are not complete.
    """
    if not prompts:
        raise ScaleError("There are no prompts to calibrate KV scales from; give some.")
    if margin is not None and not margin > 0:
        raise ScaleError(f"The margin of KV scales is {margin}; set it to 1 or a little more.")
    first = _named(start or {}, "KV scales to start from")
    gate, workers = RequestGate(llm), Workers(llm)
    begun = False

    def change() -> dict[str, float]:
        nonlocal begun
        require_idle(llm)
        gate.require_open()
        begun = True
        gate.close("KV scales are being calibrated, or a calibration broke off", _REMEDY)
        scales = _calibrated(llm, workers, prompts, margin, first)
        workers.call("fp8rl_set_kv_scales", scales)
        forget_prefixes(llm, _OLD_CODES)
        gate.open()
        return scales

    def undo(reason: str) -> None:
        if begun:
            drop_requests(llm)
            workers.call("fp8rl_stop_observing_kv")
            forget_prefixes(llm, _OLD_CODES)
            gate.open()

    return Changes.of(llm.llm_engine).run(change, undo)


def _calibrated(
    llm: LLM,
    workers: Workers,
    prompts: Sequence[Prompt],
    margin: float | None,
    scales: dict[str, float],
) -> dict[str, float]:
    """Run the prompts under observation until the scales found are those that were in use.

    Args:
        margin: factor on the magnitudes; None: that of the workers' recipe.
        scales: scales of the first run, 1 where there is none.
    """
    enough = 1 if scales else _PASSES
    for number in range(1, _MOST_PASSES + 1):
        workers.call("fp8rl_observe_kv", scales)
        forget_prefixes(llm, _OLD_CODES)
        workers.call("fp8rl_admit_kv_calibration", True)
        tokens = admitted(lambda: _run(llm, prompts))
        workers.call("fp8rl_admit_kv_calibration", False)
        seen = workers.call("fp8rl_observed_kv")
        factor = seen[0]["margin"] if margin is None else margin
        before, scales = scales, _scales(seen, tokens, factor)
        clipped = any(rank["clipped"] for rank in seen) or any(
            scale > before.get(name, 1.0) * factor * _COVERED for name, scale in scales.items()
        )
        if number >= enough and not clipped:
            break
    return scales


def _scales(seen: Sequence[Mapping[str, Any]], tokens: int, margin: float) -> dict[str, float]:
    amax: dict[str, float] = {}
    for rank in seen:  # each holds some of the heads
        for name, value in rank["amax"].items():
            amax[name] = max(amax.get(name, 0.0), value) if value == value else value
    if not amax:
        raise ScaleError(_NO_FP8_CACHE)
    if min(rank["tokens"] for rank in seen) < tokens:
        raise ScaleError(
            "Not all prompts could be observed: some ran inside full CUDA graphs. Give prompts of "
            "at least two tokens, and start the engine with cudagraph_mode 'FULL_AND_PIECEWISE' "
            "or 'PIECEWISE', or enforce_eager=True."
        )
    places = {name: parse_scale_name(name) for name in amax}
    layers = 1 + max(place[0] for place in places.values() if place)
    table = torch.ones(layers, len(ROLES), dtype=torch.float64)
    for name, place in places.items():
        assert place is not None
        table[place[0], ROLES.index(place[1])] = amax[name]
    scales = scales_from_amax(table, margin)
    return {name: scales[name].item() for name in amax}


def _run(llm: LLM, prompts: Sequence[Prompt]) -> int:
    """Run prompts alone and return how many of their tokens no full CUDA graph takes.

    Such a graph may take the last token of a prompt that ends in a step of its own.
    """
    from vllm import SamplingParams

    requests: Any = [
        prompt if isinstance(prompt, str | Mapping) else {"prompt_token_ids": list(prompt)}
        for prompt in prompts
    ]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        skip_reading_prefix_cache=True,  # or a prefix that prompts share is seen only once
    )
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return sum(len(output.prompt_token_ids or ()) - 1 for output in outputs)
