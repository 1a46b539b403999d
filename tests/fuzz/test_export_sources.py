"""Exports of a source that changes while it is read, at any point."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
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
from support.model_folders import model, weights

SCALES = {f"model.layers.0.self_attn.{role}_scale": 0.5 + n for n, role in enumerate("kv")}
READERS = {module.__file__ for module in (export, folder, weight_files)}


def source(folder: Path, files: int, version: int = 0) -> Path:
    """A model, each version with other weights, tokenizer and KV scales."""
    tensors = {n: t * (1 + version) for n, t in weights(ModelSpec.dense(1).names).items()}
    tensors |= {name: torch.tensor([scale + version]) for name, scale in SCALES.items()}
    made = model(folder, tensors, files=files, num_hidden_layers=1, version=version)
    (made / "tokenizer.json").write_text(json.dumps({"version": version}))
    return made


def export_of(made: Path, out: Path) -> dict[str, bytes]:
    write_export(plan_export(made, Recipe()), out)
    return {file.name: file.read_bytes() for file in out.iterdir()}


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


ACTIONS: dict[str, Callable[[Path, Path], object]] = {
    "overwrite": overwrite,
    "replace": lambda old, new: shutil.copyfile(new, old.with_name(".new")).replace(old),
    "truncate": lambda old, new: os.truncate(old, old.stat().st_size // 2),
    "remove": lambda old, new: old.unlink(),
    "a pipe": lambda old, new: (old.unlink(), os.mkfifo(old)),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Lines that an undisturbed export of the largest source runs."""
    folder = tmp_path_factory.mktemp("lines")
    counter = Change(-1, lambda: None)
    counter.during(export_of, source(folder / "in", 3), folder / "out")
    return counter.lines


def test_sources_that_change(lines, budget, counts):
    @settings(parent=budget(20))
    @given(
        files=st.integers(1, 3),
        action=st.sampled_from(sorted(ACTIONS)),
        which=st.integers(0, 20),
        share=st.floats(0, 1),
    )
    def check(files: int, action: str, which: int, share: float) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = source(folder / "in", files)
            other = source(folder / "other", files, 1)
            names = sorted(file.name for file in made.iterdir())
            chosen = names if which >= len(names) else [names[which]]

            def change() -> None:
                for each in chosen:
                    ACTIONS[action](made / each, other / each)

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
