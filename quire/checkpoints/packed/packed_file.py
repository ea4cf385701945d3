"""A file of weights: a description of them, and the bytes of their tensors as in memory.

    magic, length and checksum of the header | header, msgpack | 0 ... | tensor 0 | 0 ... | tensor 1 | ...
                                                                4096              a multiple of 64

The header and each tensor have checksums, so a corrupted file is not used. Nothing in the file is executed.
"""

import mmap
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

_PREFIX = struct.Struct("<8sQQ")
_MAGIC = b"quire-w1"
_PAGE = 4096
_LINE = 64
_WRITTEN_AT_ONCE = 1 << 25  # bytes


class DamagedError(ValueError):
    """The content of a file is damaged."""


class StoppedError(Exception):
    """Writing a file was aborted."""


class _Tensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    begin: int  # offset of its bytes from the first byte of all tensors
    end: int
    checksum: bytes = bytes(8)


class _Header(msgspec.Struct, array_like=True):
    weights: Any
    tensors: list[_Tensor]


def size_of(tensors: list[Tensor]) -> int:
    """Return the bytes of a file with these tensors, without its header."""
    return sum(_rounded(tensor.nbytes, _LINE) for tensor in tensors)


def write(handle: int, weights: Any, tensors: list[Tensor], is_stopped: Callable[[], bool]) -> None:
    """Write a new file and flush it to the disk. weights: plain data. The tensors must not change during the call.
    Raises OSError, such as for a full disk, and StoppedError.
    """
    entries: list[_Tensor] = []
    for tensor in tensors:
        begin = _rounded(entries[-1].end, _LINE) if entries else 0
        entries.append(
            _Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin, begin + tensor.nbytes)
        )
    header = _Header(weights, entries)
    start = _rounded(_PREFIX.size + len(msgspec.msgpack.encode(header)), _PAGE)  # checksums do not change its length
    os.ftruncate(handle, start + size_of(tensors))
    for entry, tensor in zip(entries, tensors, strict=True):
        content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        entry.checksum = xxhash.xxh3_64_digest(content)
        for begin in range(0, len(content), _WRITTEN_AT_ONCE):
            _write(handle, content[begin : begin + _WRITTEN_AT_ONCE], start + entry.begin + begin)
            if is_stopped():  # the tensor may have changed while it was written
                raise StoppedError
    encoded = msgspec.msgpack.encode(header)
    prefix = _PREFIX.pack(_MAGIC, len(encoded), xxhash.xxh3_64_intdigest(encoded))
    _write(handle, memoryview(prefix + encoded), 0)
    os.fsync(handle)


def read(handle: int) -> tuple[Any, list[Tensor]]:
    """Return the weights and their tensors, which are views of the file. Their memory is a private mapping: writes do
    not change the file. Pages that are not written are shared with all processes that read the file. Raises OSError if
    the file cannot be mapped, and DamagedError.
    """
    size = os.fstat(handle).st_size
    if size < _PREFIX.size:
        raise DamagedError("it is too short")
    mapping = mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # use huge pages for data that is read from the disk
    memory = memoryview(mapping)
    magic, length, checksum = _PREFIX.unpack_from(memory)
    encoded = memory[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or len(encoded) != length or xxhash.xxh3_64_intdigest(encoded) != checksum:
        raise DamagedError("its header has changed")
    header = msgspec.msgpack.decode(encoded, type=_Header)
    start = _rounded(_PREFIX.size + length, _PAGE)
    content = memory[start:]
    if len(content) != (_rounded(header.tensors[-1].end, _LINE) if header.tensors else 0):
        raise DamagedError("its length has changed")
    parts = [content[entry.begin : entry.end] for entry in header.tensors]
    with ThreadPoolExecutor(torch.get_num_threads(), "quire-weights") as threads:  # this also maps all pages
        if list(threads.map(xxhash.xxh3_64_digest, parts)) != [entry.checksum for entry in header.tensors]:
            raise DamagedError("its tensors have changed")
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = []
    for entry in header.tensors:
        tensor = everything[start + entry.begin : start + entry.end].view(getattr(torch, entry.dtype))
        tensors.append(tensor.view(entry.shape))
    return header.weights, tensors


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _write(handle: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(handle, content, offset)
        content = content[count:]
        offset = offset + count
