"""Refits on a GPU: reused buffers, streams, no memory left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")


from fp8rl import Recipe
from fp8rl.errors import Fp8RLError, RefitError
from fp8rl.numerics import quantize_block, whole_groups
from support.gpu_engine import GpuEngine, refit_tensors, start_engine
from vllm_fp8rl.refit import refit
from vllm_fp8rl.storage.block_grid import BlockGrid, WriteBatch, empty_storage

BUSY = 2_000_000  # clock ticks of a kernel that only waits: about a millisecond


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Iterator[GpuEngine]:
    engine = start_engine(checkpoints["a"], Recipe(), enforce_eager=True)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def a(engine: GpuEngine, checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Tensors of ``a`` on the GPU; the engine has them."""
    return given(engine, checkpoints["a"])


@pytest.fixture
def b(engine: GpuEngine, checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {n: t.cuda() for n, t in refit_tensors(checkpoints["b"], engine.recipe).items()}


def given(engine: GpuEngine, path: Path) -> dict[str, torch.Tensor]:
    tensors = {n: t.cuda() for n, t in refit_tensors(path, engine.recipe).items()}
    refit(engine.llm, tensors.items(), expect_kv_scales=True)
    return tensors


def state(engine: GpuEngine) -> dict[str, torch.Tensor]:
    torch.cuda.synchronize()
    return {name: p.detach().cpu().clone() for name, p in engine.model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(t.reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8))
        for n, t in one.items()
    )


def test_buffers_reused_after_the_acknowledgement_on_alternating_streams(engine, a, b) -> None:
    """As NeMo RL's consumer: a buffer and a stream each, synchronized before it is filled anew."""
    engine.model.load_weights(list(b.items()))
    expected = state(engine)
    names = sorted(b, key=lambda name: name[::-1])
    size = max(t.numel() for t in b.values()) * 3
    for listed in (True, False):
        engine.model.load_weights(list(a.items()))
        torch.cuda.synchronize()
        buffers = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        groups = [names[i : i + 3] for i in range(0, len(names), 3)]
        for number, group in enumerate(groups):
            buffer, stream = buffers[number % 2], streams[number % 2]
            stream.synchronize()
            with torch.cuda.stream(stream):
                buffer.fill_(torch.nan)
                torch.cuda._sleep(BUSY)
                views, first = [], 0
                for name in group:
                    if b[name].dtype != torch.bfloat16:
                        views.append((name, b[name]))
                        continue
                    view = buffer[first : first + b[name].numel()].view(b[name].shape)
                    view.copy_(b[name])
                    views.append((name, view))
                    first += b[name].numel()
                engine.model.load_weights(views if listed else iter(views))
        for stream in streams:
            stream.synchronize()
        assert same(expected, state(engine))


@pytest.mark.parametrize("seed", range(4))
def test_shards_that_share_blocks_come_on_different_streams(seed) -> None:
    """One arrival quantizes what others left: without waiting for them it would read old rows."""
    draw = random.Random(seed)
    partitions = [draw.choice([40, 64, 100, 128, 200, 300]) for _ in range(draw.randint(2, 5))]
    columns = draw.choice([128, 256, 300])
    with torch.device("cuda"):
        storage = empty_storage(sum(partitions), draw.choice([columns, whole_groups(columns)]))
    grid = BlockGrid("layer", lambda: storage, partitions, columns, "fp32", "cuda")
    whole = torch.randn(sum(partitions), columns, dtype=torch.bfloat16, device="cuda")
    starts = [sum(partitions[:i]) for i in range(len(partitions))]
    streams = [torch.cuda.Stream() for _ in range(3)]
    buffers = []
    torch.cuda.synchronize()
    for _ in range(2):
        for start, rows in draw.sample(list(zip(starts, partitions, strict=True)), len(starts)):
            with torch.cuda.stream(draw.choice(streams)):
                torch.cuda._sleep(draw.choice([0, BUSY]))
                buffer = whole[start : start + rows].clone()
                if draw.random() < 0.5:
                    batch = WriteBatch()
                    with torch.no_grad():
                        grid.write(grid.whole(start), buffer, batch)
                    torch.cuda._sleep(draw.choice([0, BUSY]))
                    batch.run()
                else:
                    grid.write(grid.whole(start), buffer)
                buffers.append(buffer)
    torch.cuda.synchronize()
    expected = quantize_block(whole.cpu())
    codes = storage[0].view(torch.uint8).cpu()
    assert not codes[:, columns:].any()
    assert torch.equal(codes[:, :columns], expected.codes.view(torch.uint8))
    assert torch.equal(storage[1].cpu(), expected.scale_inv)


@pytest.mark.parametrize("seed", range(2))
def test_codes_and_scales_come_on_different_streams(seed) -> None:
    draw = random.Random(seed)
    starts, rows = (0, 256), [256, 72]  # codes begin where a block does
    with torch.device("cuda"):
        storage = empty_storage(328, 256)
    grid = BlockGrid("layer", lambda: storage, rows, 256, "fp32", "cuda")
    halves = [quantize_block(torch.randn(count, 256, device="cuda")) for count in rows]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    arrivals = [(kind, i) for kind in ("codes", "scales") for i in range(2)]
    for kind, i in draw.sample(arrivals, 4):
        with torch.cuda.stream(draw.choice(streams)):
            torch.cuda._sleep(draw.choice([0, BUSY]))
            if kind == "codes":
                buffer = halves[i].codes.clone()
                grid.write(grid.whole(starts[i]), buffer)
            else:
                buffer = halves[i].scale_inv.clone()
                grid.write_scales(grid.whole(starts[i]), buffer)
            torch.cuda.current_stream().synchronize()  # the acknowledgement
            buffer.view(torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    host = empty_storage(328, 256)
    reference = BlockGrid("layer", lambda: host, rows, 256, "fp32")
    for i, half in enumerate(halves):
        reference.write(reference.whole(starts[i]), half.codes.cpu())
        reference.write_scales(reference.whole(starts[i]), half.scale_inv.cpu())
    assert torch.equal(storage[0].view(torch.uint8).cpu(), host[0].view(torch.uint8))
    assert torch.equal(storage[1].cpu(), host[1])


def test_extra_memory_of_a_refit_is_small(engine, a, b) -> None:
    refit(engine.llm, b.items(), expect_kv_scales=True)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    refit(engine.llm, a.items(), expect_kv_scales=True)
    assert torch.cuda.max_memory_allocated() - held < 1 << 20
    assert torch.cuda.memory_allocated() == held


def test_without_memory_to_stage_tensors_from_the_host(engine, a, checkpoints) -> None:
    tokens = engine.greedy()
    host = refit_tensors(checkpoints["b"], engine.recipe)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    hog: list[torch.Tensor] = []
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for size in (1 << 20, 1 << 14, 1 << 9):  # every free piece that a tensor would fit into
            while True:
                try:
                    hog.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        with pytest.raises(RefitError, match=r"No memory was left .*smaller batches"):
            refit(engine.llm, host.items(), expect_kv_scales=True)
    finally:
        hog.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    with pytest.raises(Fp8RLError, match="half-updated"):
        engine.greedy()
    refit(engine.llm, a.items(), expect_kv_scales=True)
    assert engine.greedy() == tokens
