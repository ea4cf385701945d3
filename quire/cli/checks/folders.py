"""Checks of the folders to which Quire writes: caches, state and temporary files."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.cli.checks.finding import Finding, memory_text, note, ok, problem
from quire.messages.errors import error_text
from quire.platform.folders import cache_folder, private_folder, state_folder

_NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "gluster", "lustre", "beegfs", "gpfs", "afs", "fuse.")
_VOLATILE = {"tmpfs": "in memory", "ramfs": "in memory", "overlay": "in the container's own layer"}
_LITTLE = 5 << 30  # bytes of free space, below which most models cannot be downloaded
_LONGEST_SOCKET = 107  # characters of the path of a Unix domain socket
_SOCKET = "/reports"  # the longest name of one of an engine's sockets


def check_quire_cache() -> Iterator[Finding]:
    folder = cache_folder()
    if folder is None:
        advice = "Set XDG_CACHE_HOME to a folder that this user can write."
        yield note("this user has no home folder, so compiled kernels cannot be kept", advice)
    elif reason := why_not_writable(folder):
        advice = "Set XDG_CACHE_HOME to a folder that this user can write, unless it has all kernels."
        yield note(f"{folder} cannot be written: {reason}", advice)
    elif _file_system(folder)[0].startswith(_NETWORK):
        advice = "Set XDG_CACHE_HOME to a folder on a local disk if starts are slow."
        yield note(f"{_described(folder)}; kernels are loaded over the network at every start", advice)
    else:
        yield ok(_described(folder))


def check_hub_cache() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    if HF_HUB_CACHE.startswith("~"):
        advice = "Set HF_HOME to a folder that this user can write, or give --download-dir."
        yield note("this user has no home folder, so models cannot be downloaded", advice)
        return
    if reason := why_not_writable(folder):
        yield note(
            f"{folder} cannot be written, so models cannot be downloaded: {reason}",
            "Set HF_HOME to a folder that this user can write, or give --download-dir, unless it has all models.",
        )
        return
    found = _described(folder)
    kind = _file_system(folder)[0]
    if kind.startswith(_NETWORK):
        advice = "Put HF_HOME on a local disk if starts are slow."
        yield note(f"{found}; weights are read over the network at every start", advice)
    elif kind in _VOLATILE:
        advice = "Mount a volume for downloads, and set HF_HOME to it."
        yield note(f"{found}; downloads are {_VOLATILE[kind]} and are lost with it", advice)
    elif _free(folder) < _LITTLE:
        advice = "Delete models (hf cache rm), or set HF_HOME to a larger disk."
        yield note(f"{found}, which is too little for most models", advice)
    else:
        yield ok(found)


def check_state() -> Iterator[Finding]:
    folder = state_folder()
    reason = "this user has no home folder" if folder is None else why_not_writable(folder)
    if reason or folder is None:
        yield note(
            f"stored responses and the history of quire chat cannot be kept on disk: {reason}",
            "Set XDG_STATE_HOME to a folder that this user can write, or choose --response-store.",
        )
    else:
        yield ok(_described(folder))


def check_temporary_files() -> Iterator[Finding]:
    try:
        folder = private_folder("quire-", longest=_LONGEST_SOCKET - len(_SOCKET))
    except OSError as error:
        advice = "A megabyte is enough, and the folder may be in memory and mounted noexec."
        yield problem(f"quire serve cannot make its sockets: {error_text(error)}", advice)
        return
    folder.rmdir()
    yield ok(_described(folder.parent))


def why_not_writable(folder: Path) -> str | None:
    """Return the reason why this user cannot write to the folder or, if it is missing, cannot create it; None if that
    is possible.
    """
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return None
    except OSError as error:
        return error.strerror or error_text(error)


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _described(folder: Path) -> str:
    kind, device = _file_system(folder)
    place = f" on {device} ({kind})" if kind else ""
    return f"{folder}, {memory_text(_free(folder))} free{place}"


def _free(folder: Path) -> int:
    facts = os.statvfs(_existing(folder))
    return facts.f_bavail * facts.f_frsize


def _file_system(folder: Path) -> tuple[str, str]:
    """Return the type and the device of the folder's file system, empty if unknown."""
    import psutil

    path = _existing(folder).resolve()
    on = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    if not on:
        return "", ""
    found = max(reversed(on), key=lambda part: len(part.mountpoint))  # of two at the same place, the later one counts
    return found.fstype, found.device
