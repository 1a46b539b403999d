"""What a batch may hold: pairs of names and plain tensors, each in memory of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8rl.errors import RefitError
from vllm_fp8rl.refit import batches
from vllm_fp8rl.refit.tensor_stream import steady
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


@settings(max_examples=150)
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


def test_tensors_without_a_count_of_writes():
    with torch.inference_mode():
        made = torch.ones(4)
    assert steady([("a", made)]) == [("a", made)]
    with pytest.raises(RefitError, match="'b' came in the memory of 'a'"):
        steady([("a", made), ("b", made[2:])])


VALUES = torch.arange(1.0, 13.0).view(3, 4)
Sent = tuple[torch.Tensor, Callable[[], object]]
"""A tensor with the values, and what its sender does to the memory once it has given it away."""


def by_numpy(make: Callable[[np.ndarray], torch.Tensor]) -> Callable[[Path], Sent]:
    def sent(folder: Path) -> Sent:
        memory = VALUES.numpy().copy()
        return make(memory), lambda: memory.fill(0)

    return sent


def by_torch(write: Callable[[torch.Tensor], object]) -> Callable[[Path], Sent]:
    def sent(folder: Path) -> Sent:
        tensor = VALUES.clone()
        return tensor, lambda: write(tensor)

    return sent


def of_inference(folder: Path) -> Sent:
    with torch.inference_mode():
        tensor = VALUES.clone()
    return tensor, torch.inference_mode()(tensor.zero_)


def of_a_file(folder: Path) -> Sent:
    """As of another process: two mappings of one file."""
    (folder / "memory").write_bytes(VALUES.numpy().tobytes())
    mine, theirs = (
        torch.from_file(str(folder / "memory"), shared=True, size=12).view(3, 4) for _ in range(2)
    )
    return mine, lambda: theirs.zero_()


def of_shared_memory(folder: Path) -> Sent:
    tensor = VALUES.clone().share_memory_()
    return tensor, lambda: tensor.data.zero_()


def of_a_part(folder: Path) -> Sent:
    whole = torch.zeros(5, 8)
    whole[1:4, 2:6] = VALUES
    return whole[1:4, 2:6], lambda: whole.data.zero_()


MEMORIES: dict[str, Callable[[Path], Sent]] = {
    "numpy": by_numpy(torch.from_numpy),
    "numpy, a parameter": by_numpy(lambda array: torch.nn.Parameter(torch.from_numpy(array))),
    "buffer": by_numpy(
        lambda array: torch.frombuffer(memoryview(array).cast("B"), dtype=torch.float32).view(3, 4)
    ),
    "dlpack": by_numpy(torch.from_dlpack),
    "in torch": by_torch(torch.Tensor.zero_),
    "data": by_torch(lambda tensor: tensor.data.zero_()),
    "storage": by_torch(lambda tensor: tensor.untyped_storage().fill_(0)),
    "numpy of torch": by_torch(lambda tensor: tensor.numpy().fill(0)),
    "freed": by_torch(lambda tensor: tensor.untyped_storage().resize_(0)),
    "inference": of_inference,
    "file": of_a_file,
    "shared memory": of_shared_memory,
    "part": of_a_part,
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("limit", [1, VALUES.nbytes + 1, 1 << 20])
def test_what_a_sender_does_to_memory_that_it_gave_away(memory, limit, tmp_path):
    """Torch counts few of these writes."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            tensor, spoil = MEMORIES[memory](tmp_path)
            yield str(number), tensor
            spoil()

    for read in (
        lambda: [
            item for batch in batches(stream(), limit) for item in list(load(pack(batch)).items())
        ],
        lambda: steady(stream()),
        lambda: load(pack(stream())).items(),
    ):
        came = dict(read())
        assert came.keys() == {"0", "1", "2"}
        assert all(torch.equal(tensor, VALUES) for tensor in came.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize")
def test_tensors_of_other_kinds_have_their_values_or_are_refused():
    class Named(torch.Tensor):
        pass

    scalar, grown = torch.tensor(3.0), VALUES.clone().requires_grad_()
    kinds = {
        "expanded": torch.ones(1, 4).expand(3, 4),
        "transposed": VALUES.t(),
        "strided": torch.arange(24.0).view(3, 8)[:, ::2],
        "zero-dimensional": scalar,
        "without elements": VALUES[:0],
        "with a gradient": grown,
        "computed": grown * 2,
        "subclass": VALUES.as_subclass(Named),
        "parameter": torch.nn.Parameter(VALUES),
        "buffer": torch.nn.Buffer(VALUES),
    }
    for tensor in kinds.values():
        for stream in ([("a", tensor)], iter([("a", tensor)])):
            assert torch.equal(load(pack(stream))["a"], tensor.detach().as_subclass(torch.Tensor))
    with FakeTensorMode():
        fake = torch.empty(3, 4)
    refused = {
        r"is a FakeTensor and no plain tensor": fake,
        "has no values yet": torch.nn.UninitializedParameter(),
        "is a nested tensor; send each": torch.nested.nested_tensor([VALUES, VALUES]),
        r"layout torch\.sparse_csr; send its to_dense": VALUES.to_sparse_csr(),
        r"layout torch\._mkldnn; send its to_dense": VALUES.to_mkldnn(),
        "device 'meta'": VALUES.to("meta"),
        r"is quantized by torch; send its dequantize\(\)": torch.quantize_per_tensor(
            VALUES, 1.0, 0, torch.qint8
        ),
    }
    for message, tensor in refused.items():
        for stream in ([("a", tensor)], iter([("a", tensor)])):
            with pytest.raises(RefitError, match=message):
                pack(stream)


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
