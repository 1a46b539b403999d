"""Exports of any source: one that changes at any point, is damaged, or leads elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl import Recipe, export, weight_files
from fp8rl.errors import Fp8RLError
from fp8rl.export import plan_export, write_export
from fp8rl.models import folder
from fp8rl.models.spec import ModelSpec
from support.model_folders import model, read, weights

NAMES = ModelSpec.dense(1).names
FP8 = [name for name in NAMES if name.endswith("_proj") or "self_attn" in name]
SCALES = {f"model.layers.0.self_attn.{role}_scale": 0.5 + n for n, role in enumerate("kv")}
INDEX = "model.safetensors.index.json"
SECRET = b"what is outside of the folder belongs to others"
READERS = {module.__file__ for module in (export, folder, weight_files)}
BAD_NAMES = (
    "model.layers.0.mlp.down_proj.weight_scale_inv",
    "model.layers.0.mlp.down_proj.input_scale",
    "mtp.layers.0.self_attn.k_scale",
    "model.layers.00.self_attn.k_scale",
    "model.layers.0.self_attn.attn.k_scale",
    "model.layers.0.self_attn.k_proj.k_scale",
    "model.language_model.layers.0.self_attn.k_scale",
    "model.layers.1.self_attn.v_scale",
)
"""Each would be read as a scale of the model."""
ODD_NAMES = ("x", "é.weight", "model.layers.1.mlp.up_proj.weight", "a.scale", "k_scale.weight")


def source(folder: Path, files: int, version: int = 0, hub: bool = False) -> Path:
    """A model, each version with other weights, tokenizer and KV scales."""
    made = folder if not hub else folder / "snapshots" / "revision"
    tensors = {
        name: tensor[: tensor.shape[0] // 2].contiguous() * (1 + version)
        for name, tensor in weights(
            ModelSpec.dense(1).names, 128, gate_proj=256, up_proj=256
        ).items()
    }
    for name in ("o_proj", "down_proj"):  # their columns are halved rows of others
        tensors |= {n: t.repeat(2, 1)[:, : 128 if name[0] == "d" else 256].contiguous()
                    for n, t in tensors.items() if name in n}  # fmt: skip
    tensors |= {name: torch.tensor([scale + version]) for name, scale in SCALES.items()}
    model(made, tensors, files=files, num_hidden_layers=1, version=version)
    (made / "tokenizer.json").write_text(json.dumps({"version": version}))
    if hub:
        blobs = folder / "blobs"
        blobs.mkdir()
        for number, file in enumerate(sorted(made.iterdir())):
            file.rename(blobs / str(number))
            file.symlink_to(f"../../blobs/{number}")
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def export_of(made: Path, out: Path) -> dict[str, bytes]:
    write_export(plan_export(made, Recipe()), out)
    return content(out)


class Change:
    """Does something before the n-th line that the readers run."""

    def __init__(self, line: int, action: Callable[[], None]) -> None:
        self.lines = 0
        self._line, self._action = line, action

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._count if frame.f_code.co_filename in READERS else None

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            if self.lines == self._line:
                sys.settrace(None)  # or it would count its own lines
                self._action()
                sys.settrace(self)
            self.lines += 1
        return self._count

    def during(self, action: Callable[..., Any], *arguments: Any) -> Any:
        before = sys.gettrace()
        try:
            sys.settrace(self)
            return action(*arguments)
        finally:
            sys.settrace(before)


def overwrite(old: Path, new: Path) -> None:
    """In place: a reader that has it open sees both."""
    with old.open("r+b") as file:
        file.write(new.read_bytes())
        file.truncate()


def replace(old: Path, new: Path) -> None:
    copy = old.with_name(".new")
    shutil.copyfile(new, copy)
    copy.replace(old)


def truncate(old: Path, new: Path) -> None:
    os.truncate(old, old.stat().st_size // 2)


def remove(old: Path, new: Path) -> None:
    old.unlink()


def to_fifo(old: Path, new: Path) -> None:
    old.unlink()
    os.mkfifo(old)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Lines that an undisturbed export of the largest source runs."""
    folder = tmp_path_factory.mktemp("lines")
    counter = Change(-1, lambda: None)
    counter.during(export_of, source(folder / "in", 3), folder / "out")
    return counter.lines


def test_sources_that_change(
    lines: int, budget: Callable[[int], settings], counts: Counter[str]
) -> None:
    @settings(parent=budget(40))
    @given(
        files=st.integers(1, 3),
        hub=st.booleans(),
        action=st.sampled_from((overwrite, replace, truncate, remove, to_fifo)),
        which=st.integers(0, 20),
        share=st.floats(0, 1),
    )
    def check(files: int, hub: bool, action: Callable[..., None], which: int, share: float) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = source(folder / "in", files, hub=hub)
            other = source(folder / "other", files, 1)
            names = sorted(file.name for file in made.iterdir())
            chosen = names if which >= len(names) else [names[which]]

            def change() -> None:
                for each in chosen:
                    action(made / each, other / each)

            before = export_of(made, folder / "before")
            whole: dict[str, bytes] | None = None
            try:
                whole = Change(int(share * lines), change).during(export_of, made, folder / "out")
            except Fp8RLError as error:
                assert len(str(error)) < 4000
                counts["exports of sources that change, refused"] += 1
            counts["exports of sources that change"] += 1
            left = {path.name for path in folder.iterdir()} - {"in", "other", "before"}
            assert left == (set() if whole is None else {"out"})
            if whole is not None and whole != before:  # the change came before the first look
                assert whole == export_of(made, folder / "after")

    check()


def damage_index(made: Path, draw: Callable[[Any], Any]) -> None:
    index = made / INDEX
    table = json.loads(index.read_text())["weight_map"]
    name = draw(st.sampled_from(sorted(table)))
    table[name] = draw(
        st.sampled_from(
            (
                *("../secret", str(made.parent / "secret"), "..", ".", "", "a/b", "\0", "\ud800"),
                *("part-0.safetensors/", "x" * 300, "none.safetensors", None, 3, [], "config.json"),
            )
        )
    )
    index.write_text(json.dumps({"weight_map": table}))


def index_twice(made: Path, draw: Callable[[Any], Any]) -> None:
    text = (made / INDEX).read_text()
    key = '"model.norm.weight": '
    (made / INDEX).write_text(text.replace(key, f'{key}"part-0.safetensors", {key}'))


def link_elsewhere(made: Path, draw: Callable[[Any], Any]) -> None:
    names = [*sorted(file.name for file in made.iterdir()), "vocab.json"]
    file = made / draw(st.sampled_from(names))
    file.unlink(missing_ok=True)
    target = draw(st.sampled_from(("../secret", "../nowhere", file.name, "/dev/zero")))
    file.symlink_to(target)


def cut_or_pad(made: Path, draw: Callable[[Any], Any]) -> None:
    file = made / draw(st.sampled_from(sorted(f.name for f in made.glob("*.safetensors"))))
    data = file.read_bytes()
    file.write_bytes(
        data[: draw(st.integers(0, len(data) - 1))] if draw(st.booleans()) else data * 2
    )


def another_length(made: Path, draw: Callable[[Any], Any]) -> None:
    file = next(made.glob("*.safetensors"))
    data = file.read_bytes()
    length = draw(st.sampled_from((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
    file.write_bytes(length.to_bytes(8, "little") + data[8:])


def bad_config(made: Path, draw: Callable[[Any], Any]) -> None:
    file = made / "config.json"
    values = json.loads(file.read_text())
    key = draw(st.sampled_from(("model_type", "num_hidden_layers", "text_config", "layer_types")))
    values[key] = draw(st.sampled_from(([], [[]], {"a": 1}, "\ud800", True, -1, 1e400, 10**30)))
    text = draw(st.sampled_from((json.dumps(values).encode(), b"[" * 2000, b"\xff", b"[]")))
    file.write_bytes(text)


DAMAGES = (damage_index, index_twice, link_elsewhere, cut_or_pad, another_length, bad_config)


def test_damaged_sources(budget: Callable[[int], settings], counts: Counter[str]) -> None:
    @settings(parent=budget(60))
    @given(data=st.data(), files=st.integers(2, 3), damage=st.sampled_from(DAMAGES))
    def check(data: st.DataObject, files: int, damage: Callable[..., None]) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = source(folder / "in", files)
            (folder / "secret").write_bytes(SECRET)
            before = export_of(made, folder / "before")
            damage(made, data.draw)
            counts["damaged sources"] += 1
            try:
                whole = export_of(made, folder / "out")
            except Fp8RLError as error:
                str(error).encode()
                assert len(str(error)) < 4000
                counts["damaged sources, refused"] += 1
                assert not (folder / "out").exists()
            else:
                assert not any(SECRET in each for each in whole.values())
                for each in (whole.keys() | before.keys()) - {"config.json"}:
                    assert whole[each] == before[each]
            assert not list(folder.glob(".*"))

    check()


def test_names_of_tensors(budget: Callable[[int], settings], counts: Counter[str]) -> None:
    """What is written is what the formula makes of the source, or nothing."""

    @settings(parent=budget(40))
    @given(
        bad=st.sets(st.sampled_from(BAD_NAMES), max_size=2),
        odd=st.sets(st.sampled_from(ODD_NAMES) | st.text(max_size=8), max_size=3),
        files=st.integers(1, 3),
    )
    def check(bad: set[str], odd: set[str], files: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = source(folder / "first", 1)
            extra = {n: torch.full((1,), 9.0) for n in bad | odd if n != "__metadata__"}
            tensors = read(made) | extra
            made = model(folder / "in", tensors, files=files, num_hidden_layers=1)
            counts["names of tensors"] += 1
            if bad:
                with pytest.raises(Fp8RLError):
                    export_of(made, folder / "out")
                counts["names of tensors, refused"] += 1
                assert sorted(path.name for path in folder.iterdir()) == ["first", "in"]
                return
            export_of(made, folder / "out")
            found = read(folder / "out")
            codes = {n for n, t in found.items() if t.dtype == torch.float8_e4m3fn}
            assert codes == {f"{module}.weight" for module in FP8 if "norm" not in module}
            assert found.keys() == tensors.keys() | {f"{n}_scale_inv" for n in codes}
            for n, tensor in tensors.items():
                if n not in codes:
                    assert torch.equal(found[n], tensor)
                    continue
                scale = found[f"{n}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
                scale = scale[: tensor.shape[0], : tensor.shape[1]].double()
                error = (found[n].double() * scale - tensor.double()).abs()
                assert (error <= tensor.double().abs() / 16 + scale * 2**-10 + 1e-6).all()

    check()
