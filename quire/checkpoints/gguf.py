"""GGUF, llama.cpp's file format: metadata and tensors in one file, or in several numbered files.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import re
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.gguf_types import TYPES, TensorType
from quire.messages.errors import error_text
from quire.platform.files import check_regular
from quire.text.strings import Strings

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_SIZES = {"<u4": struct.Struct("<I"), "<u8": struct.Struct("<Q")}  # the most frequent numbers of a header
_STRING = 8
_ARRAY = 9
_MAX_COUNT = 2**24  # largest number of values of a metadata array: sixty times the largest known vocabulary
_FEW = 1024  # maximum length of an array of numbers that becomes a list
_AT_ONCE = 1 << 20  # bytes in which the beginnings of strings are searched at once
_WALKED = 4096  # strings that are read one by one if that finds nothing
_KEPT = 2  # files whose headers stay cached
_SETTLED = 100_000_000  # nanoseconds after a change within which another change might get the same timestamp
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in a file. shape: in torch's order, outputs first. offset: bytes from the file's beginning."""

    file: Path
    offset: int
    kind: TensorType
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.offset + math.prod(self.shape) // self.kind.elements * self.kind.nbytes

    @property
    def row_bytes(self) -> int:
        """The bytes of a row. Each element of a vector counts as a row, so vectors and matrices are sliced in the same
        way."""
        width = self.shape[-1] if len(self.shape) > 1 else 1
        return width // self.kind.elements * self.kind.nbytes


@dataclass(frozen=True)
class GgufFile:
    """The metadata of a file, and the places of its tensors. All readers of the file share it, so it must not be
    changed.

    metadata: an array of strings is a `Strings`, a long array of numbers a numpy array, any other array a list.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads the header. It checks every length against the rest of the file before it allocates anything."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> int:
        """Skip the next `size` bytes, and return their position. Raises WeightError if the file is too short."""
        start = self.position
        if size > len(self.data) - start:
            raise WeightError("the file ends early")
        self.position += size
        return start

    def number(self, kind: str) -> Any:
        form = _SIZES.get(kind)
        if form is None:
            return self.array(kind, 1)[0]
        return form.unpack_from(self.data, self.take(form.size))[0]

    def array(self, kind: str, count: int) -> list[Any]:
        values: list[Any] = self._numbers(kind, count).tolist()
        return values

    def _numbers(self, kind: str, count: int) -> npt.NDArray[Any]:
        start = self.take(np.dtype(kind).itemsize * count)
        return np.frombuffer(self.data[start : self.position], kind, count)

    def text(self) -> str:
        start = self.take(self.number("<u8"))
        return self.data[start : self.position].decode("utf-8", errors="replace")

    def strings(self, count: int) -> Strings:
        """Read strings, each preceded by its length in eight bytes."""
        first = self.position
        found = [np.empty(0, np.int64)]
        remaining = count
        walked = _WALKED
        while remaining:
            places = self._lengths_at_once(remaining) if remaining > 1 else found[0]
            if not len(places):
                places = self._lengths(min(remaining, walked))
                walked *= 2  # so that a file without matches is read quickly
            found.append(places)
            remaining -= len(places)
        data = np.frombuffer(self.data[first : self.position], np.uint8).copy()
        places = np.concatenate(found) - first
        stops = np.append(places[1:], len(data))[: len(places)]
        starts = places + 8
        if len(places):  # the lengths are not part of the text
            np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))[places] = 0
        return Strings(data, starts, stops - starts)

    def _lengths(self, count: int) -> npt.NDArray[np.int64]:
        """Return the positions of the lengths of the next strings."""
        data = self.data
        start = self.position
        end = len(self.data)
        length = struct.Struct("<Q").unpack_from
        places = []
        for _ in range(count):
            if start + 8 > end or (stop := start + 8 + length(data, start)[0]) > end:
                raise WeightError("the file ends early")
            places.append(start)
            start = stop
        self.position = start
        return np.array(places, np.int64)

    def _lengths_at_once(self, count: int) -> npt.NDArray[np.int64]:
        """Like `_lengths`, but without reading string by string, for a run of strings shorter than 256 bytes. Works
        only if no other eight bytes between them look like a length."""
        chunk = self.data[self.position : self.position + _AT_ONCE]
        if len(chunk) < 8:
            return np.empty(0, np.int64)
        numbers = np.ndarray((len(chunk) - 7,), "<u8", chunk, strides=(1,))
        places = np.flatnonzero(numbers < 256)[:count]
        stops = places + 8 + numbers[places].astype(np.int64)
        follows = np.concatenate([[0], stops])[: len(places)] == places
        places = places[: len(places) if follows.all() else int(follows.argmin())]
        if not len(places):
            return places
        start = self.position
        stop = self.position + int(stops[len(places) - 1])
        if stop > len(self.data):
            raise WeightError("the file ends early")
        self.position = stop
        return places + start

    def value(self) -> Any:
        kind = self.number("<u4")
        if kind != _ARRAY:
            return self.text() if kind == _STRING else self._values(kind, 1).tolist()[0]
        kind = self.number("<u4")
        count = self.number("<u8")
        if count > _MAX_COUNT:
            raise WeightError(f"it has an array of {count} values in its metadata")
        values = self._values(kind, count)
        return values.tolist() if isinstance(values, np.ndarray) and count <= _FEW else values

    def _values(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            return self.strings(count)
        if kind not in _NUMBERS:
            raise WeightError(f"a metadata value is of the unknown type {kind}")
        return self._numbers(_NUMBERS[kind], count)


class _Identity(NamedTuple):
    """Two files with equal fields have the same content."""

    device: int
    number: int
    size: int
    modified: int
    changed: int


def _identity(path: Path) -> _Identity:
    info = path.stat()
    return _Identity(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


_kept: dict[Path, tuple[dict[Path, _Identity], GgufFile]] = {}  # the files that were read last, with all of their parts


def read_gguf(path: Path) -> GgufFile:
    """Return the metadata and the tensors of a file. If it is the first of several, the tensors of the others are
    included.

    A file that has not changed since it was read is not read again. Raises WeightError for files that are damaged or
    not supported.
    """
    known = _kept.get(path)
    try:
        if known is not None and all(_identity(part) == identity for part, identity in known[0].items()):
            return known[1]
    except OSError:  # reading the file will raise the error
        pass
    parts: dict[Path, _Identity] = {}
    found = _read(path, parts)
    _kept.pop(path, None)
    if time.time_ns() - max(identity.changed for identity in parts.values()) > _SETTLED:
        _kept[path] = parts, found
    for oldest in list(_kept)[:-_KEPT]:
        _kept.pop(oldest, None)
    return found


def _read(path: Path, parts: dict[Path, _Identity]) -> GgufFile:
    """Records the files that were read in `parts`."""

    def read(part: Path) -> GgufFile:
        try:
            parts[part] = _identity(part)
        except OSError as error:
            raise WeightError(f"{part} cannot be read as GGUF: {error_text(error)}") from error
        return read_part(part)

    first = read(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return first
    if not (part := re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)):
        message = f"{path} is one of {count} files; give the first, whose name ends in -00001-of-{count:05}.gguf"
        raise WeightError(message)
    for i in range(2, count + 1):
        first.tensors.update(read(path.with_name(f"{part[1]}-{i:05}-of-{part[2]}.gguf")).tensors)
    return first


def read_part(path: Path) -> GgufFile:
    """Return the metadata and the tensors of one file. Raises WeightError."""
    try:
        with check_regular(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except (WeightError, OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise WeightError(f"{path} cannot be read as GGUF: {error_text(error)}") from error


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.data[cursor.take(4) : 4] != b"GGUF":
        raise WeightError("it does not begin with the letters GGUF")
    if (version := cursor.number("<u4")) not in (2, 3):
        raise WeightError(f"its version is {version} (supported: 2 and 3, little-endian)")
    num_tensors = cursor.number("<u8")
    num_values = cursor.number("<u8")
    metadata = {}
    for _ in range(num_values):
        name = cursor.text()
        metadata[name] = cursor.value()
    table = [_Entry.read(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise WeightError(f"general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors = {entry.name: entry.tensor(path, base) for entry in table}
    _check_places(tensors, len(cursor.data))
    return GgufFile(path, metadata, tensors)


class _Entry(NamedTuple):
    """An entry of the tensor table. kind: ggml's number of the type. offset: from the end of the table."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> "_Entry":
        name = cursor.text()
        dims = cursor.number("<u4")
        if not 1 <= dims <= 4:
            raise WeightError(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed(cursor.array("<u8", dims)))
        return cls(name, shape, cursor.number("<u4"), cursor.number("<u8"))

    def tensor(self, path: Path, base: int) -> GgufTensor:
        kind = TYPES.get(self.kind)
        if kind is None:
            supported = ", ".join(t.name for t in TYPES.values())
            raise WeightError(
                f"tensor {self.name} is of ggml type {self.kind}, which is not supported; supported: {supported}"
            )
        if self.shape[-1] % kind.elements or (len(self.shape) == 1 and not kind.is_float):
            raise WeightError(f"tensor {self.name} has rows of {self.shape[-1]} elements, which cannot be {kind.name}")
        return GgufTensor(path, base + self.offset, kind, self.shape)


def _check_places(tensors: Mapping[str, GgufTensor], file_bytes: int) -> None:
    for name, tensor in tensors.items():
        if tensor.stop > file_bytes:
            raise WeightError(f"tensor {name} lies beyond the end of the file")
    for name, following in pairwise(sorted(tensors, key=lambda name: tensors[name].offset)):
        if tensors[name].stop > tensors[following].offset:  # such as blocks of a different size from ggml's
            raise WeightError(f"tensors {name} and {following} overlap")


_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Stored:
    """A checkpoint tensor, and how it is stored.

    expert: its index, if it is part of a tensor of all experts. rotary_heads: the number of heads, if llama.cpp stores
    the two rows of a rotated pair next to each other. shift: added to the stored values. scale: a vector with the
    factor of each expert's values, or of all values.
    """

    tensor: GgufTensor
    expert: int | None = None
    rotary_heads: int | None = None
    shift: float = 0.0
    scale: GgufTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def factor(self) -> float:
        """The factor of the stored values."""
        if self.scale is None:
            return 1.0
        values: list[float] = Stored(self.scale).floats().tolist()
        return values[self.expert or 0] if len(values) > 1 else values[0]

    @property
    def _count(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    def _offset(self, row: int) -> int:
        """Return the offset of a row, in bytes from the file's beginning."""
        return self.tensor.offset + ((self.expert or 0) * self._count + row) * self.tensor.row_bytes

    def rows(self, start: int, stop: int) -> Bytes:
        """Return the bytes of the rows [start, stop): [stop - start, bytes of a row]"""
        total = self._count
        width = self.tensor.row_bytes
        if self.rotary_heads is not None:
            pairs = np.arange(total).reshape(self.rotary_heads, -1, 2).swapaxes(1, 2).ravel()
            return self._read(0, total, width)[pairs[start:stop]]
        return self._read(start, stop, width)

    def fill(self, start: int, memory: memoryview) -> bool:
        """Read rows from `start` on into memory. Returns False if the file stores rows in a different order. Raises
        WeightError."""
        if self.rotary_heads is not None:
            return False
        with self.tensor.file.open("rb", buffering=0) as stream:
            stream.seek(self._offset(start))
            while memory:
                count = stream.readinto(memory)
                if not count:
                    raise WeightError(f"{self.tensor.file} ends within a tensor")
                memory = memory[count:]
        return True

    def floats(self) -> npt.NDArray[np.float32]:
        """Return the values of a float tensor, as a vector, without the shift. Raises WeightError for another type."""
        if self.tensor.kind.name not in _FLOATS:
            raise WeightError(f"{self.tensor.file}: a tensor of floats has the type {self.tensor.kind.name}")
        data = self.rows(0, self.shape[0])
        if self.tensor.kind.name == "BF16":  # bfloat16 is the upper half of a float32
            return (data.view("<u2").astype("<u4") << 16).view("<f4").ravel()
        return data.view(f"<f{self.tensor.kind.nbytes}").astype(np.float32).ravel()

    def _read(self, start: int, stop: int, width: int) -> Bytes:
        offset = self._offset(start)
        data = np.fromfile(self.tensor.file, np.uint8, (stop - start) * width, offset=offset)
        return data.reshape(stop - start, width)
