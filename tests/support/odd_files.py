"""Things in a folder that are no regular files, and that a reader would wait for or never finish."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # the path of a socket may have 107 characters only
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


# By name: what makes it at a path, and how an error describes it.
ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "socket": (_socket, "a socket"),
    "folder": (Path.mkdir, "a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
}


def replace_file(path: Path, kind: str) -> str:
    """Put something odd in the place of a file. Returns the error's description of it."""
    make, description = ODD_FILES[kind]
    path.unlink(missing_ok=True)
    make(path)
    return f"{path.name} is {description}, and not a regular file"
