"""Downloads a model and reports the progress as JSON objects in the format of Ollama's /api/pull."""

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from quire.checkpoints.hub import resolve
from quire.cli.models.cache import cache_folder, complete_snapshot, folder_of
from quire.cli.models.place import check_place
from quire.cli.models.remote import HubUnreachableError, RemoteModel, ask_hub, describe, progress_bars

_INTERVAL = 0.2  # seconds between two looks at the files
_UNFINISHED = ".incomplete"  # the end of a file's name while huggingface_hub writes it
_CHUNK = 4 << 20  # bytes that are hashed at once

Line = dict[str, Any]


def download(name: str, revision: str | None, download_dir: str | None, token: Any) -> Iterator[Line]:
    """Download a model from the hub: yields {"status"}, with "digest", "total" and "completed" (bytes) for each file,
    until {"status": "success"}.

    A file whose SHA-256 differs from the hub's is deleted. Raises ModelNotFoundError, OSError, and
    ValueError for a damaged file or a model that Quire cannot run.
    """
    yield {"status": "pulling manifest"}
    try:
        remote = ask_hub(name, revision, token)
    except HubUnreachableError:
        if complete_snapshot(name, revision, download_dir) is None:
            raise
        yield {"status": "success"}
        return
    folder = folder_of(remote.name, download_dir)
    missing = remote.missing(folder)
    if missing and (problem := describe(remote, token).problem) is not None:
        raise ValueError(f"nothing is downloaded, since Quire cannot run this model: {problem}")
    check_place(cache_folder(download_dir), sum(missing.values()))
    with ThreadPoolExecutor(1) as threads, progress_bars(shown=False), _unfinished_files_removed():
        fetching = threads.submit(resolve, remote.full_name, revision, download_dir, token)
        yield from _progress(remote, folder / "blobs", fetching)
    yield {"status": "verifying sha256 digest"}
    for file in missing:
        _verify(folder / "blobs" / remote.blobs[file], file)
    yield {"status": "success"}


def _progress(remote: RemoteModel, blobs: Path, fetching: "Future[Path]") -> Iterator[Line]:
    """Yield a line whenever more of a file has arrived. Raises the errors of the download."""
    reported: dict[str, int] = {}
    while True:
        is_done = fetching.done()
        if is_done:
            fetching.result()
        for name, total in remote.needed.items():
            blob = remote.blobs[name]
            completed = total if is_done else min(total, _size(blobs, blob))
            if completed != reported.get(blob):
                reported[blob] = completed
                digest = f"sha256:{blob}" if len(blob) == 64 else blob
                yield {"status": f"pulling {blob[:12]}", "digest": digest, "total": total, "completed": completed}
        if is_done:
            return
        wait([fetching], _INTERVAL)


def _size(blobs: Path, blob: str) -> int:
    """Return the number of downloaded bytes of a file."""
    sizes = [0]
    for path in (blobs / blob, *blobs.glob(f"{blob}*{_UNFINISHED}")):
        with contextlib.suppress(OSError):  # it was renamed meanwhile
            sizes.append(path.stat().st_size)
    return max(sizes)


def _verify(path: Path, name: str) -> None:
    """Raises ValueError if the content does not match the file's name in the cache."""
    if len(path.name) != 64:  # a small file, which is named by its SHA-1 in git
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != path.name:
        path.unlink()
        raise ValueError(f"{name} is damaged: its SHA-256 is {digest.hexdigest()}, not {path.name}; pull it again")


@contextlib.contextmanager
def _unfinished_files_removed() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the process immediately, without its incomplete files, which the library
    does not resume.
    """

    def end(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # there is no /proc
            for handle in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (path := os.readlink(handle)).endswith(_UNFINISHED):
                        os.unlink(path)
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
