"""Whether there is space for a download."""

import os
import shutil
from pathlib import Path

from quire.cli.models.words import size_text


def check_place(folder: Path, size: int) -> None:
    """Raises OSError if `size` bytes cannot be written to this folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OSError(f"nothing can be written to {existing}; download_dir takes another folder")
    if free < size:
        raise OSError(
            f"{size_text(size)} are to be downloaded, but only {size_text(free)} are free in {existing}; "
            "download_dir takes another folder"
        )
