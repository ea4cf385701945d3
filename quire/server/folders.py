"""Folders that clients may use."""

from pathlib import Path

from quire.messages.errors import error_text
from quire.server.errors import ApiError


def folder_below(root: str, path: str, option: str, param: str) -> Path:
    """Return the folder for a client's path relative to `root`, the value of `option`. Raises ApiError."""
    folder = Path(root).resolve()
    try:
        directory = (folder / path).resolve()
    except (ValueError, OSError) as error:  # a NUL in the path, or a symlink loop
        raise ApiError(400, f"{param}: {error_text(error)}", param=param) from error
    if not directory.is_relative_to(folder):
        raise ApiError(403, f"{param} should be a folder below {option}", param=param)
    if not directory.is_dir():
        raise ApiError(404, f"there is no folder {path[:200]!r}", param=param, code="not_found")
    return directory
