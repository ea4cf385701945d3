"""Writable folders, also for a user without a home or a passwd entry, and in a container with a read-only root."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.messages.errors import error_text

_SHARED_MEMORY = "/dev/shm"  # a container with a read-only root still has it
_NEW_SECONDS = 60.0  # within which a new folder gets its lock


def cache_folder() -> Path | None:
    """Return the cache folder, for files that can be recreated: $XDG_CACHE_HOME/quire or ~/.cache/quire. It need not
    exist.

    None for a user without a home.
    """
    try:
        from platformdirs import user_cache_path
    except ImportError:  # an image for GPUs may lack the package
        return _base_folder("XDG_CACHE_HOME", ".cache")
    return _of_user(user_cache_path)


def state_folder() -> Path | None:
    """Return the folder for persistent files, such as a history: $XDG_STATE_HOME/quire or ~/.local/state/quire.

    It need not exist. None for a user without a home.
    """
    try:
        from platformdirs import user_state_path
    except ImportError:
        return _base_folder("XDG_STATE_HOME", ".local/state")
    return _of_user(user_state_path)


def _of_user(find: Callable[[str], Path]) -> Path | None:
    try:
        folder = find("quire")
    except RuntimeError:  # a user without a home, with a newer platformdirs; an older one leaves "~" in the path
        return None
    return folder if folder.is_absolute() else None


def _base_folder(variable: str, default: str) -> Path | None:
    """Return Quire's folder in a base folder of the XDG Base Directory Specification, as platformdirs does on Linux."""
    base = os.environ.get(variable, "").strip()
    try:
        folder = Path(base if os.path.isabs(base) else f"~/{default}", "quire").expanduser()
    except RuntimeError:  # a user without a home
        return None
    return folder if folder.is_absolute() else None


def private_folder(prefix: str, longest: int | None = None) -> Path:
    """Create a temporary folder that only this user can access, in Python's temporary folder ($TMPDIR, /tmp, ...) or,
    if that fails, in /dev/shm.

    longest: maximum length of the path in characters. Raises OSError if no such folder can be created.
    """
    problem: OSError = FileNotFoundError("no folder for temporary files is writable")
    for parent in (None, _SHARED_MEMORY):
        try:
            if longest is None or len(f"{parent or tempfile.gettempdir()}/{prefix}") + 8 <= longest:
                return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            problem = OSError(f"the path of {parent or tempfile.gettempdir()} is too long")
        except OSError as error:
            problem = error
    message = f"no temporary folder can be made ({error_text(problem)}); set TMPDIR to a writable folder"
    raise OSError(message) from problem


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A private folder that is removed at the end. If this process is killed, the next process that needs such a folder
    removes it. prefix: reserved for the names of these folders. parent: the default is that of `private_folder`. Raises
    OSError.
    """
    for place in {tempfile.gettempdir(), _SHARED_MEMORY} if parent is None else {str(parent)}:
        _remove_abandoned(place, prefix)
    folder = private_folder(prefix) if parent is None else Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: str, prefix: str) -> None:
    """Remove this user's scratch folders whose processes have been killed."""
    found = list[os.DirEntry[str]]()
    with contextlib.suppress(OSError):
        found = [entry for entry in os.scandir(parent) if entry.name.startswith(prefix)]
    for entry in found:
        with contextlib.suppress(OSError):  # another process is also removing it, or its owner holds the lock
            status = entry.stat(follow_symlinks=False)
            is_own = entry.is_dir(follow_symlinks=False) and status.st_uid == os.getuid()
            if is_own and time.time() - status.st_mtime > _NEW_SECONDS:
                with _locked(Path(entry.path)):
                    shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder until the process ends. Raises OSError if another process holds the lock."""
    import fcntl  # not on Windows

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
