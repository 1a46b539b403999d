"""What a batch may hold: pairs of names and plain tensors, each in memory of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load

from fp8rl.errors import RefitError
from vllm_fp8rl.refit import batches
from vllm_fp8rl.refit.tensor_stream import steady
from vllm_fp8rl.refit.transport import pack, received

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUES = torch.arange(1.0, 13.0).view(3, 4)
ONE, MATRIX = torch.ones(1), torch.ones(6, 4)
with torch.inference_mode():
    UNCOUNTED = torch.ones(4)  # torch does not count writes to it


@pytest.mark.parametrize(
    "tensors",
    [
        {"k": ONE, "v": ONE, EMBEDDING: MATRIX, HEAD: MATRIX, "t": torch.randn(3, 5).t()},
        {"a": ONE.expand(3, 3), "b": torch.zeros(0), "c": torch.zeros(0)},
        {"a": UNCOUNTED},
        {"a": MATRIX[:3], "b": MATRIX[3:]},
        {"a": MATRIX[::2], "b": MATRIX[1::2].t()},
    ],
    ids=["one number and tied ones", "no elements", "inference", "rows", "in turn"],
)
def test_memory_that_may_be_shared(tensors):
    """As it is here, and in another process."""
    items = list(tensors.items())
    assert steady(items) == items
    assert all(torch.equal(t, tensors[name]) for name, t in load(pack(items)).items())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((EMBEDDING, MATRIX), (HEAD, MATRIX[:3])),
        (("a", MATRIX), ("b", MATRIX)),
        (("a", UNCOUNTED), ("b", UNCOUNTED[2:])),
        (("a", MATRIX[:, :3]), ("b", MATRIX[:, 2:].t())),
        (("a", MATRIX[::2]), ("b", MATRIX[::3])),
    ],
)
@pytest.mark.parametrize("read", [steady, pack])
def test_tensors_that_share_a_byte_are_refused(read, first, second):
    with pytest.raises(RefitError, match=f"'{second[0]}' came in the memory of '{first[0]}'"):
        read([first, second])


@pytest.mark.parametrize(
    "given", [lambda t: t, torch.nn.Parameter, lambda t: t.t()], ids=["tensor", "parameter", "view"]
)
def test_what_a_sender_does_to_memory_that_it_gave_away(given):
    """By numpy, so that torch does not count the writes."""

    def stream():
        for number in range(3):
            memory = VALUES.numpy().copy()
            yield str(number), given(torch.from_numpy(memory))
            memory.fill(0)

    def packed(limit: int) -> list[tuple[str, torch.Tensor]]:
        return [item for part in batches(stream(), limit) for item in load(pack(part)).items()]

    for came in (
        *(packed(limit) for limit in (1, VALUES.nbytes + 1, 1 << 20)),
        steady(stream()),
        load(pack(stream())).items(),
    ):
        assert sorted(name for name, _ in came) == ["0", "1", "2"]
        assert all(torch.equal(tensor, given(VALUES)) for _, tensor in came)


def test_one_number_in_the_same_memory_again_and_again():
    """As KV scales in a buffer that numpy writes to, unseen by torch."""
    numbers = np.zeros(1, dtype=np.float32)

    def stream():
        for number in range(3):
            numbers[0] = number
            yield str(number), torch.from_numpy(numbers)

    assert [float(tensor) for _, tensor in steady(stream())] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("tensor", [VALUES[:, ::2], VALUES[:0], VALUES.clone().requires_grad_()])
def test_tensors_of_other_kinds_have_their_values(tensor):
    assert torch.equal(load(pack(iter([("a", tensor)])))["a"], tensor.detach())
    with pytest.raises(RefitError, match="'a' arrived twice"):
        pack([("a", tensor), ("a", tensor.detach().clone())])


def freed() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quant")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (freed, "The memory of 'a' was freed"),
        (torch.nn.UninitializedParameter, "has no values yet"),
        (lambda: torch.nested.nested_tensor([VALUES, VALUES]), "is a nested tensor; send each"),
        (lambda: torch.quantize_per_tensor(VALUES, 1.0, 0, torch.qint8), r"its dequantize\(\)"),
    ],
)
def test_tensors_without_plain_values_are_refused(make, message):
    """More of them: test_refusals.py."""
    with pytest.raises(RefitError, match=message):
        pack(iter([("a", make())]))


@pytest.mark.usefixtures("engine")  # of which torch.distributed has a group
def test_a_sharded_tensor():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with pytest.raises(RefitError, match=r"'a' is a DTensor.* send its full_tensor\(\)"):
        steady([("a", sharded)])
    steady([("a", sharded.full_tensor())])


@pytest.mark.parametrize("payload", [b"\xff" * 20, None, {"bytes": 1}])
def test_a_payload_that_is_none(payload):
    message = r"no batch of tensors .*transport\.pack"
    with pytest.raises(RefitError, match=message), received(payload):
        pass
