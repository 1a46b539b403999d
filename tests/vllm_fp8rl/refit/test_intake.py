"""What a batch may hold: pairs of names and plain tensors, each in memory of its own."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from fp8rl.errors import RefitError
from vllm_fp8rl.refit import batches
from vllm_fp8rl.refit.intake import steady
from vllm_fp8rl.refit.transport import pack, received

MEMORY = torch.zeros(8, 9, 10)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def elements(tensor: torch.Tensor) -> set[int]:
    """Places in the memory that a view of it has."""
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return set(
        places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    )


@st.composite
def views(draw) -> torch.Tensor:
    """Of one memory: whatever slices and transposes give."""
    view = draw(st.sampled_from([MEMORY, MEMORY.view(-1), MEMORY.transpose(0, 2)]))
    for dim in range(view.ndim):
        first = draw(st.integers(0, view.shape[dim]))
        count = draw(st.integers(0, view.shape[dim] - first))
        view = view.narrow(dim, first, count)
        step = draw(st.sampled_from([1, 1, 2, 3]))
        view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view


@settings(max_examples=400, deadline=None)
@given(st.lists(views(), min_size=2, max_size=4))
def test_tensors_that_share_a_byte_are_refused_and_no_others(tensors):
    places = [elements(tensor) for tensor in tensors]
    shared = any(
        one & other and max(len(one), len(other)) > 1
        for number, one in enumerate(places)
        for other in places[:number]
    )
    named = [(f"model.layers.{n}.weight", tensor) for n, tensor in enumerate(tensors)]
    if not shared:
        assert steady(named) == named
        return
    with pytest.raises(RefitError, match="came in the memory of"):
        steady(named)


def test_memory_that_may_be_shared():
    one, matrix = torch.ones(1), torch.ones(6, 4)
    steady([("a", one), ("b", one), (EMBEDDING, matrix), (HEAD, matrix)])
    steady([("a", torch.ones(1).expand(3, 3)), ("b", torch.zeros(0)), ("c", torch.zeros(0))])
    with pytest.raises(RefitError, match=f"'{HEAD}' came in the memory of '{EMBEDDING}'"):
        steady([(EMBEDDING, matrix), (HEAD, matrix[:3])])
    with pytest.raises(RefitError, match="'b' came in the memory of 'a'"):
        steady([("a", matrix), ("b", matrix)])


def test_one_number_in_the_same_memory_again_and_again():
    """As KV scales in a buffer that numpy writes to, unseen by torch."""
    numbers = np.zeros(1, dtype=np.float32)

    def stream():
        for number in range(3):
            numbers[0] = number
            yield str(number), torch.from_numpy(numbers)

    assert [float(tensor) for _, tensor in steady(stream())] == [0.0, 1.0, 2.0]
    gone = torch.ones(1)
    gone.untyped_storage().resize_(0)
    with pytest.raises(RefitError, match="The memory of 'a' was freed"):
        steady([("a", gone)])


def test_memory_that_is_gone():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RefitError, match="The memory of 'a' was freed before it was read"):
        steady([("a", tensor)])


def test_tensors_without_a_count_of_writes():
    with torch.inference_mode():
        made = torch.ones(4)
    assert steady([("a", made)]) == [("a", made)]
    with pytest.raises(RefitError, match="'b' came in the memory of 'a'"):
        steady([("a", made), ("b", made[2:])])


def test_batches_end_before_the_next_tensor_is_asked_for():
    memory = torch.zeros(4)

    def stream():
        for number in range(3):
            yield str(number), memory.fill_(number)

    assert [float(batch[0][1][0]) for batch in batches(stream(), 1)] == [0.0, 1.0, 2.0]
    # The tensor that does not fit into a batch is pulled before that batch is read.
    for limit in (memory.nbytes + 1, 1 << 20):
        with pytest.raises(RefitError, match="'1' came in the memory of '0'"):
            list(batches(stream(), limit))


def test_a_sharded_tensor():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"tcp://localhost:{probe.getsockname()[1]}"
    made = not torch.distributed.is_initialized()
    if made:
        torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        with pytest.raises(RefitError, match=r"'a' is a DTensor.* send its full_tensor\(\)"):
            steady([("a", sharded)])
        steady([("a", sharded.full_tensor())])
    finally:
        if made:
            torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_tensor_that_torch_has_quantized():
    codes = torch.quantize_per_tensor(torch.ones(4, 4), 1.0, 0, torch.qint8)
    with pytest.raises(RefitError, match=r"'a' is quantized by torch; send its dequantize\(\)"):
        steady([("a", codes)])


def test_tensors_that_share_memory_travel_to_another_process():
    scale, matrix = torch.ones(1), torch.randn(4, 6)
    sent = {"k": scale, "v": scale, EMBEDDING: matrix, HEAD: matrix, "t": torch.randn(3, 5).t()}
    assert all(torch.equal(load(pack(sent.items()))[name], sent[name]) for name in sent)
    with pytest.raises(RefitError, match="'b' came in the memory of 'a'"):
        pack([("a", matrix), ("b", matrix[1:])])
    with pytest.raises(RefitError, match="'a' arrived twice"):
        pack([("a", matrix), ("a", matrix.clone())])


@pytest.mark.parametrize("payload", [b"", b"x" * 40, b"\xff" * 20, None, "text", {}, {"bytes": 1}])
def test_a_payload_that_is_none(payload):
    message = r"no batch of tensors .*transport\.pack"
    with pytest.raises(RefitError, match=message), received(payload):
        pass
