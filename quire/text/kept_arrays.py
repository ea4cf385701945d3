"""Arrays that are computed from a large vocabulary, kept in the user's cache folder for later starts."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from quire.messages.errors import error_text
from quire.platform.folders import cache_folder
from quire.platform.kept_files import KeptFiles

logger = logging.getLogger("quire")

Integers = npt.NDArray[np.int64]
_LIMIT = 1 << 26  # bytes of all files
_CHECKSUM = 8  # bytes at the beginning of a file


def kept_arrays(
    name: str, sources: Sequence[npt.NDArray[Any]], lengths: Sequence[int], make: Callable[[], Sequence[Integers]]
) -> list[Integers]:
    """Return the arrays that `make` computes from the sources alone, or those that an earlier start has kept.

    name: of the computation; it changes with the code. lengths: of the arrays. Raises what `make` raises.
    """
    folder = cache_folder()
    if folder is None:
        return list(make())
    files = KeptFiles(folder / "vocabularies", _LIMIT, ".arrays")
    digest = hashlib.sha256(name.encode())
    for source in sources:
        digest.update(f" {source.nbytes} ".encode())
        digest.update(np.ascontiguousarray(source).data)
    key = digest.hexdigest()[:32]
    with contextlib.suppress(OSError), files.opened(key) as handle:
        if (found := _read(handle, lengths)) is not None:
            return found
        files.delete(key)
    arrays = list(make())
    content = np.concatenate(arrays).data.cast("B")
    try:
        files.write(key, len(content), lambda handle: _write(handle, content))
    except OSError as error:
        logger.debug("The arrays of a vocabulary are not kept for later starts: %s", error_text(error))
    return arrays


def _read(handle: int, lengths: Sequence[int]) -> list[Integers] | None:
    """Return the arrays in a file, None if it is damaged."""
    size = 8 * sum(lengths)
    with os.fdopen(os.dup(handle), "rb") as file:
        content = file.read(_CHECKSUM + size + 1)
    body = memoryview(content)[_CHECKSUM:]
    if len(body) != size or xxhash.xxh3_64_digest(body) != content[:_CHECKSUM]:
        return None
    return np.split(np.frombuffer(body, np.int64), np.cumsum(lengths)[:-1])


def _write(handle: int, content: memoryview) -> None:
    with os.fdopen(os.dup(handle), "wb") as file:
        file.write(xxhash.xxh3_64_digest(content))
        file.write(content)
