"""Files on their way into the live engine: whole and unchanged, or a refusal.

Indexes, links and pipes are those of an export too: tests/fp8rl/test_export.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.errors import RefitError
from fp8rl.models.folder import INDEX
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


def integers(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"i": torch.ones(3, dtype=torch.int64)}, folder / NAMES[0])


def header_with_a_name_twice(folder: Path) -> None:
    about = '{"dtype":"U8","shape":[4],"data_offsets":[%d,%d]}'
    header = f'{{"a":{about % (0, 4)},"a":{about % (4, 8)},"b":{about % (0, 4)}}}'.encode()
    (folder / NAMES[0]).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def piped(folder: Path) -> None:
    """A FIFO has no end until someone writes to it."""
    (folder / NAMES[0]).unlink()
    os.mkfifo(folder / NAMES[0])


UNSEEN = r"cannot be read .*, that every worker sees"
REFUSED: list[tuple[Any, str]] = [
    (lambda folder: (folder / INDEX).write_text("{"), "is not valid JSON"),
    (lambda folder: os.truncate(folder / NAMES[0], 300), r"1.saf.*' is no whole safe.*rename"),
    (header_with_a_name_twice, r"its header\.a' is given twice"),
    (integers, r"'i' in .* has dtype I64; a refit takes BF16, F16, F32"),
    (piped, f"{NAMES[0]}' is a pipe, .*; put a file in its place"),
    (lambda folder: [file.unlink() for file in folder.iterdir()], "folder without safetensors"),
    ("/no/such/folder", UNSEEN),
    ("a\0b", UNSEEN),
    ("/dev/zero", "'/dev/zero' is a pipe, a device or a socket"),
    (["a"], "is no path of a safetensors file"),
]
"""What is done to a folder, or another path, and the error; more of a folder: test_export.py."""


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_read(tmp_path, change, message):
    path = change
    if callable(change):
        shards(tmp_path)
        change(path := tmp_path)
    with pytest.raises(RefitError, match=message):
        read_files(path)


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
@pytest.mark.parametrize(("number", "after"), [(0, 1), (0, 15), (1, 1), (1, 15), (1, 20)])
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
