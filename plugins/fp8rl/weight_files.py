"""Files of a model, read so that a change of a file while it is read is an error.

Data is read, not mapped: a mapped file that is truncated meanwhile kills the process (SIGBUS). A
writer should write under a temporary name and rename the file, or the folder, at the end. What is
no regular file is refused: a FIFO would be waited for, and a device read, for ever.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fp8rl.errors import ModelError
from fp8rl.reading import parse_json, printable

if TYPE_CHECKING:
    import torch

LONGEST_TEXT = 100_000_000
"""Bytes of the longest JSON that is read, as safetensors has it for the header of a file."""
REMEDY = "write under a temporary name, rename when all is written, and try again"
_LENGTH = 8  # bytes before the header, which hold its length
_TICK = 0.02
"""Seconds: writes that are closer together may leave the same time stamp."""


DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Names of safetensors and of torch."""


class State(NamedTuple):
    """What changes when a file changes; times in nanoseconds."""

    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, found: os.stat_result) -> State:
        """Return the state that ``stat`` has found."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Watched:
    """A regular file as it was at first sight; no descriptor stays open.

    Raises:
        OSError: there is no such file, or it cannot be opened.
        ModelError: it is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _open_regular(path) as file:
            self.state = State.of(os.fstat(file.fileno()))
        # A write in the clock tick in which the state was read would leave it unchanged.
        age = (time.time_ns() - self.state.changed) / 1e9
        time.sleep(min(_TICK, max(0.0, _TICK - age)))

    def open(self) -> FileIO:
        """Open the file again.

        Raises:
            ModelError: it has been changed, replaced or removed.
        """
        try:
            file = _open_regular(self.path)
        except OSError:
            raise self._changed() from None
        if self.state != State.of(os.fstat(file.fileno())):
            file.close()
            raise self._changed()
        return file

    def is_unchanged(self) -> bool:
        """Tell whether the file has neither been changed, nor replaced, nor removed."""
        try:
            return self.state == State.of(self.path.stat())
        except OSError:
            return False

    def require_unchanged(self) -> None:
        """Raise ModelError unless :meth:`is_unchanged`."""
        if not self.is_unchanged():
            raise self._changed()

    def _changed(self) -> ModelError:
        return ModelError(f"'{self.path}' was changed while it was read; {REMEDY}.")


class About(NamedTuple):
    """A tensor of a file, by the header."""

    dtype: str
    """As safetensors writes it, such as ``BF16``."""
    shape: tuple[int, ...]
    start: int
    """Bytes from the start of the data."""


class WeightFile(Watched):
    """A safetensors file, of which the header has been read.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ModelError: it is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from safetensors import SafetensorError  # here: most commands read no weights

        try:
            with self.open() as file:
                start = _header(file, self.state.size)
            self.tensors: Mapping[str, About] = _checked(start, self.state.size)
        except (SafetensorError, ValueError) as error:
            why = str(error).removesuffix(".").splitlines()
            raise ModelError(
                f"'{path}' is no whole safetensors file ({why[0] if why else 'empty'}); download "
                "it again, or write it under a temporary name and rename it when all is written."
            ) from None
        self._data = len(start)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            ModelError: torch has none of the kind.
        """
        import torch

        found = getattr(torch, DTYPES.get(self.tensors[name].dtype, ""), None)
        if found is None:
            raise ModelError(
                f"'{printable(name)}' in '{self.path}' has dtype {self.tensors[name].dtype}, which "
                "is not read; write it in another one."
            )
        return found

    def read(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors, each into its own memory, in the order in which they lie.

        The file may still change under the last ones: ask :meth:`is_unchanged` when all are read.

        Args:
            names: names of tensors of the file; None: all.

        Raises:
            ModelError: the file was cut off, changed or replaced, or has an unknown dtype.
        """
        import torch

        wanted = self.tensors if names is None else names
        with self.open() as file:
            for name in sorted(wanted, key=lambda name: self.tensors[name].start):
                about = self.tensors[name]
                tensor = torch.empty(about.shape, dtype=self.dtype(name), device="cpu")
                data = tensor.view(-1).view(torch.uint8).numpy().data
                self._fill(file, data, self._data + about.start)
                yield name, tensor

    def _fill(self, file: FileIO, data: memoryview, start: int) -> None:
        try:
            file.seek(start)
            while data:
                count = file.readinto(data)
                if not count:
                    raise ModelError(f"'{self.path}' was cut off while it was read; {REMEDY}.")
                data = data[count:]
        except OSError as error:
            raise ModelError(
                f"'{self.path}' cannot be read ({error.strerror or error}); {REMEDY}."
            ) from None


def read_text(path: Path) -> str:
    """Read a text file; ModelError where it is no regular file, too long, or not in UTF-8."""
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LONGEST_TEXT:
            raise ModelError(
                f"'{path}' has {size} bytes, more than any such file of a model; download it again."
            )
        found = file.readall()
    try:
        return (found or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"'{path}' is not UTF-8 text ({error}); correct it.") from None


def _open_regular(path: Path) -> FileIO:
    """Open a file for reading, without waiting for the writer of a FIFO."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    _require_regular(path, path.stat())  # first: opening a device may do something
    file = FileIO(os.open(path, flags))
    try:
        _require_regular(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(21, "Is a directory", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(
            f"'{path}' is a pipe, a device or a socket, no regular file; put a file in its place."
        )


def _header(file: FileIO, size: int) -> bytes:
    """Read the header with its length; ValueError where the file is too short for it."""
    start = file.read(_LENGTH) or b""
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH or length > min(LONGEST_TEXT, size - _LENGTH):
        raise ValueError(f"it has {size} bytes, too few for a header of {length}")
    return start + (file.read(length) or b"")


def _checked(start: bytes, size: int) -> dict[str, About]:
    """Read the header's description of each tensor, from the start of a file of ``size`` bytes.

    safetensors checks it with a sparse file behind it, because the real one may be truncated at any
    moment; it raises SafetensorError or ValueError.
    """
    from safetensors import safe_open

    with tempfile.NamedTemporaryFile() as copy:
        copy.write(start)
        copy.truncate(size)
        copy.flush()
        with safe_open(copy.name, framework="numpy"):
            pass
    tensors = parse_json(start[_LENGTH:].decode("utf-8"), "its header")  # a name twice is refused
    tensors.pop("__metadata__", None)
    return {
        name: About(about["dtype"], tuple(about["shape"]), about["data_offsets"][0])
        for name, about in tensors.items()
    }


def flush(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
