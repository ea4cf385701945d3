"""Reads untrusted files: only regular files, up to a maximum size. Reading a pipe, a socket or a device in a checkpoint
could block forever or never end.
"""

import os
import stat
from pathlib import Path

MIB = 1 << 20
_MOST_ENTRIES = 100_000  # of a folder
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileError(ValueError):
    """A file is not regular or too large. The message names it."""


def check_regular(path: Path) -> Path:
    """Check that the path is a regular file or does not exist. Raises FileError for anything else."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path
    _check_mode(path, mode)
    return path


def _check_mode(path: Path | str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise FileError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'of an unknown kind')}, and not a regular file")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises FileError or OSError."""
    # The file may be replaced after the check: without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(check_regular(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        info = os.fstat(descriptor)
        _check_mode(path, info.st_mode)
        data = stream.read(min(info.st_size, most) + 1)  # Python allocates this size before it reads
    if len(data) > most:
        raise FileError(f"{path} has more than {most / MIB:g} MiB, the limit for such a file")
    return data


def check_folder(directory: Path, suffixes: tuple[str, ...]) -> None:
    """Raises FileError if a file with one of these suffixes is not regular, or if the folder has too many entries."""
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= _MOST_ENTRIES:
                raise FileError(f"{directory} has more than {_MOST_ENTRIES:,} files")
            if entry.name.endswith(suffixes):
                check_regular(Path(entry.path))
