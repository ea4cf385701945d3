"""Writable folders, also for a user without a home or a passwd entry, and in a container with a read-only root."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from quire.messages.errors import error_text

_SHARED_MEMORY = "/dev/shm"  # a container with a read-only root still has it


def cache_folder() -> Path | None:
    """The folder for files that can be made again: $XDG_CACHE_HOME/quire or ~/.cache/quire. It need not exist.

    None for a user without a home.
    """
    from platformdirs import user_cache_path  # imported here: an engine on a GPU does not need the package

    return _of_user(user_cache_path)


def state_folder() -> Path | None:
    """The folder for files to keep, such as a history: $XDG_STATE_HOME/quire or ~/.local/state/quire.

    It need not exist. None for a user without a home.
    """
    from platformdirs import user_state_path

    return _of_user(user_state_path)


def _of_user(find: Callable[[str], Path]) -> Path | None:
    try:
        folder = find("quire")
    except RuntimeError:  # a user without a home, with a newer platformdirs; an older one leaves "~" in the path
        return None
    return folder if folder.is_absolute() else None


def private_folder(prefix: str, longest: int | None = None) -> Path:
    """A new temporary folder that only this user can enter, in Python's temporary folder ($TMPDIR, /tmp, ...) or, if
    that fails, in /dev/shm.

    longest: characters that the path may have. Raises OSError if no such folder can be made.
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
