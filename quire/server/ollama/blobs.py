"""Ollama's API: files that clients upload to create models from them, HEAD and POST /api/blobs/DIGEST."""

import asyncio
import hashlib
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Depends, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from quire.server.control import check_allowed
from quire.server.errors import ApiError
from quire.server.ollama.bodies import ANSWERS, OllamaRoute
from quire.server.ollama.state import Library

router = APIRouter(route_class=OllamaRoute, dependencies=[Depends(check_allowed)])
MAX_UPLOADS = 2  # at once
_SPARE = 1 << 30  # bytes that stay free on the disk
_UNUSED_SECONDS = 24 * 3600.0  # after which a file that no model was created from is deleted
_WRITTEN = 4 << 20  # bytes written and hashed at once
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def checked_digest(digest: str, param: str = "digest") -> str:
    """Return the hexadecimal digits of a digest. Raises ApiError."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ApiError(400, f"{param} should be sha256: and 64 hexadecimal digits, got {digest[:100]!r}", param=param)
    return match[1]


@router.head("/api/blobs/{digest}", responses=ANSWERS, response_class=Response)
async def has_blob(digest: str, request: Request) -> Response:
    state: Library = request.app.state.ollama
    return Response(status_code=200 if state.library.blob(checked_digest(digest)).exists() else 404)


@router.post("/api/blobs/{digest}", responses=ANSWERS, response_class=Response)
async def upload(digest: str, request: Request) -> Response:
    """Store the body as a file, for /api/create."""
    state: Library = request.app.state.ollama
    path = state.library.blob(checked_digest(digest))
    if path.exists():
        return Response()
    if state.num_uploads >= MAX_UPLOADS:
        message = f"{MAX_UPLOADS} files are being uploaded; try again later"
        raise ApiError(503, message, code="server_overloaded", headers={"Retry-After": "10"})
    state.num_uploads += 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_unused(state)
        _check_room(path.parent, int(request.headers.get("content-length") or 0))
        await _receive(request, path)
    finally:
        state.num_uploads -= 1
    return Response(status_code=201)


async def _receive(request: Request, path: Path) -> None:
    """Write the body to a file that appears when it is complete. Raises ApiError."""
    digest = hashlib.sha256()
    waiting = bytearray()

    def write(data: bytes) -> None:
        _check_room(path.parent, len(data))
        digest.update(data)
        file.write(data)
        file.flush()

    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix="sha256-", suffix=".part", delete=False)  # noqa: SIM115
    unfinished = Path(file.name)
    try:
        with file:
            async for chunk in request.stream():
                waiting += chunk
                if len(waiting) >= _WRITTEN:
                    await asyncio.to_thread(write, bytes(waiting))
                    waiting.clear()
            await asyncio.to_thread(write, bytes(waiting))
        if path.stem != f"sha256-{digest.hexdigest()}":
            message = f"digest is {path.stem.replace('-', ':')}, but the body has sha256:{digest.hexdigest()}"
            raise ApiError(400, message, param="digest")
        unfinished.replace(path)
    except ClientDisconnect as error:
        raise ApiError(499, "the client closed the connection") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _check_room(folder: Path, size: int) -> None:
    """Raises ApiError if a file of this size would leave too little of the disk."""
    if shutil.disk_usage(folder).free - size < _SPARE:
        raise ApiError(507, f"the server's disk has no room for {size} bytes", code="disk_full")


def _delete_unused(state: Library) -> None:
    """Delete old files that no model was created from, and the remains of interrupted uploads."""
    for path in state.library.unused_blobs():
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                path.unlink()
