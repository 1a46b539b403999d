"""Files on their way into the live engine: whole and unchanged, or a refusal.

Indexes, links and pipes are those of an export too: tests/fp8rl/test_export.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from fp8rl.errors import RefitError, ScaleError
from fp8rl.models.folder import INDEX
from fp8rl.weight_files import WeightFile
from support.engine import PROMPTS
from vllm_fp8rl.refit import refit_from_files
from vllm_fp8rl.refit.receiver.files import read_files

NAMES = ["model-1.safetensors", "model-2.safetensors"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]

pytestmark = pytest.mark.usefixtures("engine")  # files are compared between the ranks of one


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor.float(), other[name].float())
        for name, tensor in one.items()
    )


def shards(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two files and their index, and one that an earlier, larger checkpoint left behind."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{number}.{shape}": torch.randn(shape, generator=generator).to(dtype)
        for number, dtype in enumerate(DTYPES)
        for shape in [(), (0, 3), (7,), (33, 5), (2, 3, 4)]
    }
    folder.mkdir(parents=True, exist_ok=True)
    where = {tensor: NAMES[number % 2] for number, tensor in enumerate(tensors)}
    for name in NAMES:
        save_file({t: tensors[t] for t in where if where[t] == name}, folder / name)
    save_file({"stale": torch.ones(3)}, folder / "model-3.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return tensors


def test_every_tensor_as_it_was_saved(tmp_path):
    tensors = shards(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "revision"  # of a hub's cache: links to blobs
    snapshot.mkdir(parents=True)
    for name in (*NAMES, INDEX):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    for folder in (tmp_path / "blobs", str(snapshot)):
        assert same(dict(read_files(folder)), tensors)
    (snapshot / INDEX).unlink()
    assert same(dict(read_files(snapshot)), tensors)
    one = dict(read_files(snapshot / NAMES[0]))
    assert same(one, {name: tensors[name] for name in one}) and len(one) == 10


def index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def content(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / NAMES[0]).write_bytes(data)


def without_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"i": torch.ones(3, dtype=torch.int64)}, folder / NAMES[0])


def piped(name: str) -> Callable[[Path], object]:
    """A FIFO has no end until someone writes to it."""
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


def header_with_a_name_twice() -> bytes:
    about = '{"dtype":"U8","shape":[4],"data_offsets":[%d,%d]}'
    header = f'{{"a":{about % (0, 4)},"a":{about % (4, 8)},"b":{about % (0, 4)}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


WHOLE = save({"a": torch.ones(8, 8)})
NOT_WHOLE = rf"{NAMES[0]}' is no whole safetensors file .*rename"
DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (index("{"), "is not valid JSON"),
    (index("[]"), "holds a list, not a JSON object"),
    (index('{"weight_map": {"x": 1}}'), "has no weight_map from tensors to files"),
    (index('{"weight_map": {}}'), "is a folder without safetensors files"),
    (index('{"weight_map": {"x": "../a.b"}}'), "is no name of a file in its folder"),
    (index('{"weight_map": {"x": "a.b", "x": "c.d"}}'), "weight_map.x' is given twice"),
    (index('{"weight_map": {"x": "model-9.safetensors"}}'), f"{INDEX}' names 'model-9.*not there"),
    (index('{"weight_map": {"x": "model-1.safetensors"}}'), f"holds '0.* against what '{INDEX}'"),
    (content(save({"0.()": torch.ones(1)})), f"{NAMES[0]}' lacks '0.*against what"),
    *((content(part), NOT_WHOLE) for part in (b"", WHOLE[:40], WHOLE[:-1], WHOLE + b"x")),
    (content(b"\xff" * 300), NOT_WHOLE),
    (content(header_with_a_name_twice()), r"its header\.a' is given twice"),
    (without_an_index, r"'i' in .* has dtype I64; a refit takes BF16, F16, F32"),
    (piped(NAMES[0]), f"{NAMES[0]}' is a pipe, .*; put a file in its place"),
    (piped(INDEX), f"{INDEX}' is a pipe, .*; put a file in its place"),
    (lambda folder: [file.unlink() for file in folder.iterdir()], "folder without safetensors"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_a_damaged_folder(tmp_path, damage, message):
    shards(tmp_path)
    damage(tmp_path)
    with pytest.raises(RefitError, match=message):
        read_files(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", r"cannot be read .*, that every worker sees"),
        ("a\0b", r"cannot be read .*, that every worker sees"),
        ("/dev/zero", "'/dev/zero' is a pipe, a device or a socket"),
        (None, "is no path of a safetensors file"),
        (["a"], "is no path of a safetensors file"),
    ],
)
def test_other_paths(path, message):
    with pytest.raises(RefitError, match=message):
        read_files(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.weight": torch.ones(2)}, "has no tensor 'x.weight'"),
        ({"model.norm.weight": torch.ones(2, 2)}, "'model.norm.weight' has shape"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, "k_scale' has shape"),
    ],
    ids=["name", "shape", "scale"],
)
def test_names_and_shapes_are_looked_up_before_data_is_read(
    engine, b, intact, tmp_path, monkeypatch, tensors, message
):
    """A tensor of gigabytes that nobody has asked for, and one at the end of a long refit."""
    save_file({n: t for n, t in b.items() if n not in tensors}, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    monkeypatch.setattr(WeightFile, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises((RefitError, ScaleError), match=message):
        refit_from_files(engine.llm, str(tmp_path), expect_kv_scales="scale" in message)
    assert intact()


def rewrite(path: Path) -> None:
    """In place, with as many bytes."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def replace(path: Path) -> None:
    """By a file of the same bytes and times."""
    times, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_the_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("old"))
    shards(path.parent, 1)


def write_an_index(path: Path) -> None:
    table = json.loads((path.parent / INDEX).read_text())
    table["weight_map"] = {n: f for n, f in table["weight_map"].items() if f != path.name}
    (path.parent / INDEX).write_text(json.dumps(table))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "rewritten": rewrite,
    "cut off": lambda path: os.truncate(path, 500),
    "replaced": replace,
    "folder replaced": replace_the_folder,
    "removed": Path.unlink,
    "index": write_an_index,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", [1, 15, 20])
def test_a_change_while_files_are_read(tmp_path, change, number, after):
    """Read to its end, being read, or later; at once after it was written (coarse clocks)."""
    folder = tmp_path / "weights"
    shards(folder)
    tensors = read_files(folder)
    for _ in range(after):
        next(tensors)
    CHANGES[change](folder / NAMES[number])
    with pytest.raises(RefitError, match=r"was (changed|cut off) while it was read; write under a"):
        list(tensors)


def test_a_refit_from_a_file_that_is_rewritten(engine, checkpoints, tmp_path, monkeypatch):
    """It would load one half of each, and report it complete."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((checkpoints["a"] / "model.safetensors").read_bytes())
    tokens, read = engine.greedy(PROMPTS), WeightFile.read

    def rewritten(file: object) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(read(file)):
            if number == 9:
                path.write_bytes((checkpoints["b"] / "model.safetensors").read_bytes())
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(WeightFile, "read", rewritten)
        patch.setattr("vllm_fp8rl.refit.receiver.worker.BATCH_BYTES", 1 << 18)
        with pytest.raises(RefitError, match=rf"'{path}' was changed while it was read"):
            refit_from_files(engine.llm, str(path), expect_kv_scales=False)
    engine.refuses(RefitError, "half-updated")
    refit_from_files(engine.llm, str(checkpoints["a"]), expect_kv_scales=False)
    assert engine.greedy(PROMPTS) == tokens
