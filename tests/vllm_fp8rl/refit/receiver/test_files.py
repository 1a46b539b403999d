"""Files on their way into the live engine: whole and unchanged, or a refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from fp8rl.errors import RefitError, ScaleError
from fp8rl.models.folder import INDEX
from fp8rl.weight_files import WeightFile
from support.engine import Engine, load_tensors
from vllm_fp8rl.refit import refit_from_files
from vllm_fp8rl.refit.receiver.files import read_files

PROMPTS = [[5, 6, 7, 8], [9] * 40]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
NAMES = ["model-1.safetensors", "model-2.safetensors"]

pytestmark = pytest.mark.usefixtures("engine")  # files are compared between the ranks of one


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (0, 3), (7,), (33, 5), (2, 3, 4)]
    return {
        f"{number}.{shape}": torch.randn(shape, generator=generator).to(dtype)
        for number, dtype in enumerate(DTYPES)
        for shape in shapes
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor.float(), other[name].float())
        for name, tensor in one.items()
    )


def shards(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two files and their index."""
    tensors = some_tensors(seed)
    folder.mkdir(exist_ok=True)
    halves = [dict(list(tensors.items())[half::2]) for half in (0, 1)]
    for name, half in zip(NAMES, halves, strict=True):
        save_file(half, folder / name)
    where = {tensor: name for name, half in zip(NAMES, halves, strict=True) for tensor in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return tensors


def test_every_tensor_as_it_was_saved(tmp_path):
    tensors = shards(tmp_path)
    assert same(dict(read_files(tmp_path)), tensors)
    (tmp_path / INDEX).unlink()
    assert same(dict(read_files(str(tmp_path))), tensors)
    one = dict(read_files(tmp_path / NAMES[0]))
    assert same(one, {name: tensors[name] for name in one}) and len(one) == 10


def test_what_an_index_does_not_name_does_not_count(tmp_path):
    """A shard that an earlier, larger checkpoint left behind."""
    tensors = shards(tmp_path)
    save_file({"stale": torch.ones(3)} | some_tensors(1), tmp_path / "model-3.safetensors")
    assert same(dict(read_files(tmp_path)), tensors)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list, not a JSON object"),
        ("{}", "has no weight_map from tensors to files"),
        ('{"weight_map": {}}', "is a folder without safetensors files"),
        ('{"weight_map": {"x": 1}}', "has no weight_map from tensors to files"),
        ('{"weight_map": {"x": "../model.safetensors"}}', "is no name of a file in its folder"),
        ('{"weight_map": {"x": "/model.safetensors"}}', "is no name of a file in its folder"),
        ('{"weight_map": {"x": "a.b", "x": "c.d"}}', "weight_map.x' is given twice"),
        ('{"weight_map": {"x": "model-9.safetensors"}}', f"{INDEX}' names 'model-9.*not there"),
        ('{"weight_map": {"x": "model-1.safetensors"}}', f"holds '0.* against what '{INDEX}' says"),
    ],
)
def test_an_index_that_is_wrong(tmp_path, index, message):
    shards(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(RefitError, match=message):
        read_files(tmp_path)


def test_an_index_that_names_more_than_its_files_hold(tmp_path):
    shards(tmp_path)
    table = json.loads((tmp_path / INDEX).read_text())
    table["weight_map"]["x"] = NAMES[1]
    (tmp_path / INDEX).write_text(json.dumps(table))
    with pytest.raises(RefitError, match=rf"{NAMES[1]}' lacks 'x', against what"):
        read_files(tmp_path)


WHOLE = save({"a": torch.ones(8, 8)})


@pytest.mark.parametrize(
    "content",
    [b"", WHOLE[:5], WHOLE[:40], WHOLE[:-1], WHOLE + b"x", b"\xff" * 300, b"PK\x03\x04" * 99],
)
def test_what_is_no_whole_file(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(RefitError, match=rf"^'{path}' is no whole safetensors file .*rename"):
        read_files(path)


def test_other_paths(tmp_path):
    for path in (tmp_path / "none", "a\0b"):
        with pytest.raises(RefitError, match=r"cannot be read .*, that every worker sees"):
            read_files(path)
    with pytest.raises(RefitError, match="folder without safetensors files"):
        read_files(tmp_path)
    for path in (None, 5, ["a"]):
        with pytest.raises(RefitError, match="is no path of a safetensors file"):
            read_files(path)
    save_file({"i": torch.ones(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(RefitError, match=r"'i' in .* has dtype I64; a refit takes BF16, F16, F32"):
        read_files(tmp_path)


@pytest.mark.parametrize("where", ["model.safetensors", INDEX, "/dev/zero"])
def test_what_is_no_regular_file(tmp_path, where):
    """A FIFO has no end until someone writes to it, a device none at all."""
    if where.startswith("/"):
        with pytest.raises(RefitError, match="'/dev/zero' is a pipe, a device or a socket"):
            read_files(where)
        return
    shards(tmp_path)
    (tmp_path / where).unlink(missing_ok=True)
    os.mkfifo(tmp_path / where)
    if where != INDEX:
        (tmp_path / INDEX).unlink()
    with pytest.raises(RefitError, match=f"{where}' is a pipe, .*; put a file in its place"):
        read_files(tmp_path)


def test_links_of_a_hub_cache(tmp_path):
    """A snapshot's files are links to blobs; one that leads nowhere is no reason to look away."""
    tensors = shards(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    for name in (*NAMES, INDEX):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert same(dict(read_files(snapshot)), tensors)
    (tmp_path / "blobs" / INDEX).unlink()
    with pytest.raises(RefitError, match=r"cannot be read .*No such file"):
        read_files(snapshot)


def test_a_header_that_names_a_tensor_twice(tmp_path):
    about = '{"dtype":"U8","shape":[4],"data_offsets":[%d,%d]}'
    header = f'{{"a":{about % (0, 4)},"a":{about % (4, 8)},"b":{about % (0, 4)}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(RefitError, match=r"its header\.a' is given twice"):
        read_files(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.weight": torch.ones(2)}, "has no tensor 'x.weight'"),
        ({"model.norm.weight": torch.ones(2, 2)}, "'model.norm.weight' has shape"),
        ({"model.norm.weight": torch.ones(256).to(torch.float8_e4m3fn)}, "has dtype torch.float8"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, "k_scale' has shape"),
    ],
    ids=["name", "shape", "dtype", "scale"],
)
def test_names_shapes_and_dtypes_are_looked_up_before_data_is_read(
    engine: Engine, checkpoints, tmp_path, monkeypatch, tensors, message
):
    """A tensor of gigabytes that nobody has asked for, and one at the end of a long refit."""
    folder = tmp_path / "weights"
    folder.mkdir()
    others = load_tensors(checkpoints["b"])
    save_file({n: t for n, t in others.items() if n not in tensors}, folder / "a.safetensors")
    save_file(tensors, folder / "b.safetensors")
    monkeypatch.setattr(WeightFile, "read", lambda *_: pytest.fail("a tensor was read"))
    before = engine.greedy(PROMPTS)
    announced = "scale" in message
    with pytest.raises((RefitError, ScaleError), match=message):
        refit_from_files(engine.llm, str(folder), expect_kv_scales=announced)
    assert engine.greedy(PROMPTS) == before


def rewrite(path: Path) -> None:
    """In place, with as many bytes."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def cut_off(path: Path) -> None:
    os.truncate(path, 500)


def replace(path: Path) -> None:
    """By a file of the same bytes and times."""
    times, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_the_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("old"))
    shards(path.parent, 1)


def remove(path: Path) -> None:
    path.unlink()


def write_an_index(path: Path) -> None:
    table = json.loads((path.parent / INDEX).read_text())
    table["weight_map"] = {n: f for n, f in table["weight_map"].items() if f != path.name}
    (path.parent / INDEX).write_text(json.dumps(table))


@pytest.mark.parametrize(
    "change",
    [
        rewrite,
        cut_off,
        replace,
        replace_the_folder,
        remove,
        write_an_index,
    ],
)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", [1, 15, 20])
def test_a_change_while_files_are_read(tmp_path, change: Callable[[Path], None], number, after):
    """Read to its end, being read, or later; at once after it was written (coarse clocks)."""
    folder = tmp_path / "weights"
    shards(folder)
    tensors = read_files(folder)
    for _ in range(after):
        next(tensors)
    change(folder / NAMES[number])
    with pytest.raises(RefitError, match=r"was (changed|cut off) while it was read; write under a"):
        list(tensors)


def test_a_refit_from_a_file_that_is_rewritten(engine: Engine, checkpoints, tmp_path, monkeypatch):
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
