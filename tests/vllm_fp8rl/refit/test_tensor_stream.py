"""What a batch may hold: pairs of names and plain tensors, each in memory of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

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
VALUES = torch.arange(1.0, 13.0).view(3, 4)


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


@settings(max_examples=80)
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
    """One number, as KV scales; elements that nobody has; tied tensors, also to another process."""
    one, matrix = torch.ones(1), torch.ones(6, 4)
    with torch.inference_mode():
        uncounted = torch.ones(4)  # torch does not count writes to it
    for fitting in (
        {"k": one, "v": one, EMBEDDING: matrix, HEAD: matrix, "t": torch.randn(3, 5).t()},
        {"a": torch.ones(1).expand(3, 3), "b": torch.zeros(0), "c": torch.zeros(0)},
        {"a": uncounted},
    ):
        items = list(fitting.items())
        assert steady(items) == items
        assert all(torch.equal(t, fitting[name]) for name, t in load(pack(items)).items())
    for other, tensor, of in (
        (HEAD, matrix[:3], (EMBEDDING, matrix)),
        ("b", matrix, ("a", matrix)),
        ("b", uncounted[2:], ("a", uncounted)),
    ):
        for read in (steady, pack):
            with pytest.raises(RefitError, match=f"'{other}' came in the memory of '{of[0]}'"):
                read([of, (other, tensor)])
    with pytest.raises(RefitError, match="'a' arrived twice"):
        pack([("a", matrix), ("a", matrix.clone())])


Sent = tuple[torch.Tensor, Callable[[], object]]
"""A tensor with the values, and what its sender does to the memory once it has given it away."""


def of_numpy(make: Callable[[np.ndarray], torch.Tensor]) -> Sent:
    memory = VALUES.numpy().copy()
    return make(memory), lambda: memory.fill(0)


def of_torch(write: Callable[[torch.Tensor], object], *, inference: bool = False) -> Sent:
    with torch.inference_mode(inference):
        tensor = VALUES.clone()
    return tensor, lambda: torch.inference_mode(inference)(write)(tensor)


def of_a_part() -> Sent:
    whole = torch.zeros(5, 8)
    whole[1:4, 2:6] = VALUES
    return whole[1:4, 2:6], lambda: whole.data.zero_()


MEMORIES: dict[str, Callable[[], Sent]] = {
    "numpy": lambda: of_numpy(torch.from_numpy),
    "numpy, a parameter": lambda: of_numpy(lambda a: torch.nn.Parameter(torch.from_numpy(a))),
    "torch": lambda: of_torch(torch.Tensor.zero_),
    "data": lambda: of_torch(lambda tensor: tensor.data.zero_()),
    "freed": lambda: of_torch(lambda tensor: tensor.untyped_storage().resize_(0)),
    "inference": lambda: of_torch(torch.Tensor.zero_, inference=True),
    "part": of_a_part,
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_a_sender_does_to_memory_that_it_gave_away(memory):
    """Torch counts few of these writes."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            tensor, spoil = MEMORIES[memory]()
            yield str(number), tensor
            spoil()

    def packed(limit: int) -> list[tuple[str, torch.Tensor]]:
        return [item for part in batches(stream(), limit) for item in load(pack(part)).items()]

    for came in (
        *(packed(limit) for limit in (1, VALUES.nbytes + 1, 1 << 20)),
        steady(stream()),
        load(pack(stream())).items(),
    ):
        assert sorted(name for name, _ in came) == ["0", "1", "2"]
        assert all(torch.equal(tensor, VALUES) for _, tensor in came)


def test_one_number_in_the_same_memory_again_and_again():
    """As KV scales in a buffer that numpy writes to, unseen by torch."""
    numbers = np.zeros(1, dtype=np.float32)

    def stream():
        for number in range(3):
            numbers[0] = number
            yield str(number), torch.from_numpy(numbers)

    assert [float(tensor) for _, tensor in steady(stream())] == [0.0, 1.0, 2.0]


class Named(torch.Tensor):
    pass


GROWN = VALUES.clone().requires_grad_()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 4).expand(3, 4),
        VALUES.t(),
        torch.arange(24.0).view(3, 8)[:, ::2],
        torch.tensor(3.0),
        VALUES[:0],
        GROWN,
        GROWN * 2,
        VALUES.as_subclass(Named),
        torch.nn.Parameter(VALUES),
    ],
)
def test_tensors_of_other_kinds_have_their_values(tensor):
    for stream in ([("a", tensor)], iter([("a", tensor)])):
        assert torch.equal(load(pack(stream))["a"], tensor.detach().as_subclass(torch.Tensor))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 4)


def freed() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quant", "ignore:Spar")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fake, "is a FakeTensor and no plain tensor"),
        (freed, "The memory of 'a' was freed"),
        (torch.nn.UninitializedParameter, "has no values yet"),
        (lambda: torch.nested.nested_tensor([VALUES, VALUES]), "is a nested tensor; send each"),
        (VALUES.to_sparse_csr, r"layout torch\.sparse_csr; send its to_dense"),
        (VALUES.to_mkldnn, r"layout torch\._mkldnn; send its to_dense"),
        (lambda: VALUES.to("meta"), "device 'meta'"),
        (
            lambda: torch.quantize_per_tensor(VALUES, 1.0, 0, torch.qint8),
            r"is quantized by torch; send its dequantize\(\)",
        ),
    ],
)
def test_tensors_without_plain_values_are_refused(make, message):
    tensor = make()
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


@pytest.mark.parametrize("payload", [b"\xff" * 20, None, {"bytes": 1}])
def test_a_payload_that_is_none(payload):
    message = r"no batch of tensors .*transport\.pack"
    with pytest.raises(RefitError, match=message), received(payload):
        pass
