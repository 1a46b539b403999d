"""Memory of a sender that is filled again, cleared or freed: the weights as they were yielded.

Torch counts few of these writes. Tensors come by every way that takes a stream.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from support.models import MODELS, Live, differing
from support.wire import make_wire
from vllm_fp8rl.refit import RefitSession, drop_requests, refit

Spoil = Callable[[], object]
Memory = Callable[[torch.Tensor], tuple[torch.Tensor, Spoil]]
"""Takes a tensor; returns its values in other memory, and what writes to that later."""
RING = np.zeros(1 << 20, dtype=np.uint8)
"""One buffer for all tensors of a sender."""


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def shaped(memory: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)


def of_numpy(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
    memory = raw(tensor).copy()
    return shaped(memory, tensor), lambda: memory.fill(0)


def of_a_ring(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
    memory = RING[: tensor.nbytes]
    memory[:] = raw(tensor)
    return shaped(memory, tensor), lambda: None


def of_a_buffer(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
    memory = bytearray(raw(tensor).tobytes())
    sent = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return sent, lambda: memory.__setitem__(slice(None), bytes(len(memory)))


def of_torch(write: Callable[[torch.Tensor], object]) -> Memory:
    def sent(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
        copy = tensor.clone()
        return copy, lambda: write(copy)

    return sent


def of_a_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
    if not tensor.ndim:
        return of_numpy(tensor)
    whole = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2 + 3, dtype=tensor.dtype)
    part = whole[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)
    return part, lambda: whole.view(torch.uint8).numpy().fill(0)


def of_inference(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
    with torch.inference_mode():
        copy = tensor.clone()
    return copy, torch.inference_mode()(copy.zero_)


def negated(tensor: torch.Tensor) -> tuple[torch.Tensor, Spoil]:
    if tensor.element_size() == 1:  # torch negates no FP8
        return of_numpy(tensor)
    memory = -tensor
    return torch._neg_view(memory), lambda: memory.data.zero_()


MEMORIES: dict[str, Memory] = {
    "numpy": of_numpy,
    "ring": of_a_ring,
    "buffer": of_a_buffer,
    "in torch": of_torch(torch.Tensor.zero_),
    "data": of_torch(lambda tensor: tensor.data.zero_()),
    "storage": of_torch(lambda tensor: tensor.untyped_storage().fill_(1)),
    "freed": of_torch(lambda tensor: tensor.untyped_storage().resize_(0)),
    "part": of_a_part,
    "inference": of_inference,
    "negated": negated,
}
WAYS = ("refit", "session", "load_weights", "reload_weights", "layerwise reload")


def give(way: str, live: Live, stream: Iterator[tuple[str, torch.Tensor]], size: int) -> None:
    llm, model = live.engine.llm, live.engine.model
    if way == "refit":
        refit(llm, stream, expect_kv_scales=True, batch_bytes=size)
    elif way == "session":
        with RefitSession(model, expect_kv_scales=True) as session:
            session.load(stream)
    elif way == "reload_weights":
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
    elif way == "layerwise reload":
        initialize_layerwise_reload(model)
        model.load_weights(stream)
        finalize_layerwise_reload(model, llm.llm_engine.model_config)
    else:
        model.load_weights(stream)


@pytest.mark.parametrize("name", ["qwen3"])
def test_weights_are_those_that_were_yielded(
    name: str,
    live: Callable[[str], Live],
    budget: Callable[[int], settings],
    counts: Counter[str],
) -> None:
    started = live(name)
    model, llm = MODELS[name], started.engine.llm

    @settings(parent=budget(15))
    @given(
        seed=st.integers(0, 2**16),
        way=st.sampled_from(WAYS),
        kinds=st.lists(st.sampled_from(sorted(MEMORIES)), min_size=1, max_size=3),
        late=st.integers(0, 4),
        size=st.sampled_from((1, 1 << 15, 1 << 17, 1 << 30)),
    )
    def check(seed: int, way: str, kinds: list[str], late: int, size: int) -> None:
        wire = make_wire(model, seed, codes=way != "load_weights", kv_scales=True, calm=True)
        rng = random.Random(seed)

        def stream() -> Iterator[tuple[str, Any]]:
            waiting: list[Spoil] = []
            for key, value in wire.stream:
                tensor, spoil = MEMORIES[rng.choice(kinds)](value)
                yield key, tensor
                waiting.append(spoil)
                while len(waiting) > late:
                    waiting.pop(0)()
            for spoil in waiting:
                spoil()

        counts["senders' memory"] += 1
        drop_requests(llm)
        give(way, started, stream(), size)
        llm.reset_prefix_cache()
        assert differing(started.weights(), model.held(wire.sent())) == []
        assert started.scales() == wire.kv_scales
        assert started.serves() is not None

    check()
