"""A folder of files that later starts use, such as packed weights. They can be deleted at any time, and their total
size is bounded.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_UNFINISHED = ".part"
_SPARE = 1 << 30  # bytes of the disk that stay free


class NoRoomError(OSError):
    """The file does not fit into the folder."""


class KeptFiles:
    """limit: maximum bytes of all files in the folder. The least recently used files are deleted to make room for new
    ones. suffix: of the files' names.

    Several processes may use the folder. A writer writes a file under a temporary name while holding a lock on it, and
    then renames it. A deleted file stays readable for processes that have it open.
    """

    def __init__(self, path: Path, limit: int, suffix: str = ".weights") -> None:
        self.path = path
        self._limit = limit
        self._suffix = suffix

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Open a file and mark it as the most recently used. Raises OSError: FileNotFoundError if there is none,
        PermissionError if another user may have written it."""
        handle = os.open(self.path / (name + self._suffix), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for info in (os.fstat(handle), self.path.stat()):
                if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o002:
                    raise PermissionError(f"another user may have changed {self.path}")
            with contextlib.suppress(OSError):  # the folder of an image may be read-only
                os.utime(handle)
            yield handle
        finally:
            os.close(handle)

    def delete(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / (name + self._suffix)).unlink()

    def write(self, name: str, size: int, write: Callable[[int], None]) -> bool:
        """Create a file of about `size` bytes with `write`, which receives a handle. Returns False if the file exists
        or another process is writing it. Raises OSError and exceptions of `write`, after removing the partial file."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = self.path / (name + self._suffix)
        unfinished = self.path / (name + _UNFINISHED)
        handle = _open_locked(unfinished)
        if handle is None:
            return False
        try:
            try:
                if whole.exists():
                    return False
                os.ftruncate(handle, 0)  # remove the data of a killed process
                self._make_room(size, unfinished)
                write(handle)
                os.replace(unfinished, whole)
                return True
            finally:
                with contextlib.suppress(FileNotFoundError):  # the file was renamed
                    unfinished.unlink()
        finally:
            os.close(handle)

    def _make_room(self, size: int, own: Path) -> None:
        """Raises NoRoomError if the file would be larger than the limit, or the disk too full."""
        if size > self._limit:
            raise NoRoomError(f"they take {size} bytes, and weight_cache_size is {self._limit}")
        files = []
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == _UNFINISHED and path != own:
                    _delete_if_abandoned(path)
                elif path.suffix == self._suffix:
                    info = path.stat()
                    files.append((info.st_mtime, info.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, freed, path in sorted(files):
            if total + size <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= freed
        if shutil.disk_usage(self.path).free < size + _SPARE:
            raise NoRoomError(f"the disk of {self.path} has no room for {size} bytes")


def _open_locked(path: Path) -> int | None:
    """Open a file and lock it against other writers. Returns None if another process is writing it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        while not _locks(handle, fcntl.LOCK_EX):
            if not _locks(handle, fcntl.LOCK_SH):
                os.close(handle)
                return None
            # Another process is about to delete it, which is allowed until it is locked.
        if _is_named(handle, path):
            return handle
        os.close(handle)


def _delete_if_abandoned(path: Path) -> None:
    """Delete a file whose writer has ended."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _locks(handle, fcntl.LOCK_SH) and _is_named(handle, path):
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _locks(handle: int, kind: int) -> bool:
    """Try to lock an open file without waiting. Writers use LOCK_EX, processes that delete it LOCK_SH."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(handle: int, path: Path) -> bool:
    """Whether an open file still has this path: another process may have renamed or deleted it."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
