"""A rank's part of the disk tier: a file for each block.

    header, 4096 bytes: magic, KV group, hash, number of bytes, checksum       the block's bytes, padded to 4096

A file is written under a temporary name, and then renamed. Its checksum shows whether it is complete, even after a
power failure: files are not synced, since lost blocks are recomputed. Where the file system supports it, files bypass
the system's page cache (O_DIRECT): blocks that were read are in the KV cache, which makes better use of the memory.
"""

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

import torch
import xxhash

from quire.kv.tiers import block_path
from quire.messages.errors import error_text
from quire.messages.transfers import BlockKey, Transfer
from quire.observability.logging import logger
from quire.worker.kv_transfer import Rows, Store

_PAGE = 4096
_HEADER = struct.Struct("<8sq32sq16s")  # magic, KV group, hash, bytes of the block, checksum of them
_MAGIC = b"quire-kv"
_REST_SECONDS = 30.0  # how long saving stops after a disk failure
_SCANS = 16  # the folder is scanned when it may have grown by 1 / 16 of its limit


class DiskStore(Store):
    """Reads and writes a rank's files. Other engines may use the same folder: they read and delete whole files."""

    def __init__(
        self, folder: Path, limit: int | None, block_bytes: int, rank: int, ranks: int, ranks_here: int, deletes: bool
    ) -> None:
        """limit: maximum bytes of all files in the folder. ranks_here: the ranks on this machine. deletes: whether this
        rank deletes old files for all of them. Raises OSError if the folder cannot be used."""
        self._folder = folder
        self._limit = limit
        self._deletes = deletes and limit is not None
        self._rank = rank
        self._ranks = ranks
        self._ranks_here = ranks_here
        self._block_bytes = block_bytes
        self._file_bytes = _PAGE + -(-block_bytes // _PAGE) * _PAGE
        self._to_disk, self._from_disk = _Buffer(self._file_bytes), _Buffer(self._file_bytes)
        self._may_save_at = 0.0
        self._total, self._written = 0, 0  # bytes of the folder at the last scan, and those written since
        if self._deletes:
            self._scan()

    def save(self, rows: Rows, order: Transfer) -> list[int]:
        failed = []
        for index, (block_id, key) in enumerate(zip(order.block_ids, order.keys, strict=True)):
            if time.monotonic() < self._may_save_at:
                failed.append(index)
                continue
            rows.read([block_id], [self._to_disk.block(self._block_bytes)])
            try:
                self._make_room()
                self._write(key)
            except OSError as error:
                failed.append(index)
                self._may_save_at = time.monotonic() + _REST_SECONDS
                logger.error(
                    "KV blocks cannot be saved to %s: %s; trying again in %.0f s",
                    self._folder,
                    error_text(error),
                    _REST_SECONDS,
                )
        return failed

    def load(self, rows: Rows, order: Transfer) -> list[int]:
        failed = []
        for index, (block_id, key) in enumerate(zip(order.block_ids, order.keys, strict=True)):
            path = self._path(key)
            try:
                self._read(path, key)
            except FileNotFoundError:  # deleted by this or another engine
                failed.append(index)
                continue
            except (OSError, ValueError) as error:
                failed.append(index)
                logger.error("The KV block in %s cannot be used, and is computed: %s", path, error_text(error))
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            rows.write([block_id], [self._from_disk.block(self._block_bytes)])
        return failed

    def _path(self, key: BlockKey) -> Path:
        return block_path(self._folder, self._rank, self._ranks, key)

    def _write(self, key: BlockKey) -> None:
        """Write the block in the buffer to its file."""
        path = self._path(key)
        memory = self._to_disk.memory
        _HEADER.pack_into(memory, 0, _MAGIC, *key, self._block_bytes, self._to_disk.checksum(self._block_bytes))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            handle = _open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                if os.writev(handle, [memory]) != self._file_bytes:
                    raise OSError("the disk is full")
            finally:
                os.close(handle)
            unfinished.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        self._written += self._file_bytes

    def _read(self, path: Path, key: BlockKey) -> None:
        """Read a file into the buffer. Raises OSError, or ValueError if it is not the complete file of this block."""
        handle = _open(path, os.O_RDONLY)
        try:
            size = os.preadv(handle, [self._from_disk.memory], 0)
            with contextlib.suppress(OSError):  # the disk may be read-only
                os.utime(handle)  # it will now be deleted last
        finally:
            os.close(handle)
        expected = _HEADER.pack(_MAGIC, *key, self._block_bytes, self._from_disk.checksum(self._block_bytes))
        if size != self._file_bytes or self._from_disk.memory[: _HEADER.size] != expected:
            raise ValueError("its content was changed")

    def _make_room(self) -> None:
        """Delete the oldest files if the folder is full, or if other engines may have filled it."""
        if self._deletes and self._limit is not None:
            written = (self._written + self._file_bytes) * self._ranks_here
            if self._total + written > self._limit or written > self._limit // _SCANS:
                self._scan()
                if self._total + self._file_bytes * self._ranks_here > self._limit:
                    raise OSError("kv_offloading_disk_size is too small for a block")

    def _scan(self) -> None:
        """Add up the file sizes, and delete the oldest files until there is room for the writes until the next scan."""
        assert self._limit is not None
        files = sorted((info.st_mtime, info.st_size, path) for path, info in _files(self._folder))
        self._total = sum(size for _, size, _ in files)
        self._written = 0
        most = self._limit - max(self._limit // _SCANS, self._file_bytes * self._ranks_here)
        for _, size, path in files:
            if self._total <= most:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._total -= size


class _Buffer:
    """Page-aligned memory for direct I/O. The block begins after the header."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)

    def block(self, size: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=_PAGE)

    def checksum(self, size: int) -> bytes:
        with memoryview(self.memory) as view:
            return xxhash.xxh3_128_digest(view[_PAGE : _PAGE + size])


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)  # without direct I/O, as on tmpfs


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                info = os.lstat(path)
                if S_ISREG(info.st_mode):
                    yield path, info


def prepare_folder(folder: Path) -> None:
    """Create the folder, readable for this user only. Raises OSError if it cannot be used."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user, who could change what the model has read")
    if info.st_mode & 0o077:
        folder.chmod(0o700)
