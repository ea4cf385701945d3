"""The page at `GET /`, its files, and its stream of events."""

from collections.abc import AsyncGenerator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from quire._version import __version__
from quire.server.page.live import MOST_VIEWERS, Live

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".json": "application/json; charset=utf-8",
    ".woff2": "font/woff2",
}
_FOLDER = Path(__file__).parent / "static"
_STATIC = {
    path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in _FOLDER.rglob("*") if path.suffix in _TYPES
}  # so names from clients never reach the file system
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
OPEN_PATHS = ("/", *(f"/ui/{name}" for name in _STATIC))  # without an API key: they reveal nothing about the engine

router = APIRouter(include_in_schema=False)  # about one model
files = APIRouter(include_in_schema=False)


@files.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    return _file("index.html")


@router.get("/ui/events")
async def events(request: Request) -> Response:
    """Stream the engine's activity as server-sent events, until the client disconnects."""
    live = cast(Live, request.app.state.live)
    if live.is_full:
        raise HTTPException(503, f"{MOST_VIEWERS} viewers look at the engine already")

    async def stream() -> AsyncGenerator[bytes]:
        async with live.events() as found:
            async for event in found:
                yield event

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/ui/about")
async def about(request: Request) -> dict[str, Any]:
    """Return the server's settings that the page needs."""
    server = request.app.state.server
    parallel = server.llm.config.parallel
    llm = server.llm
    media = () if llm.processor.media is None else llm.processor.media.placeholders
    return {
        "version": __version__,
        "models": server.names,
        "generates": llm.processor.generates,
        "has_chat_template": llm.frontend.has_chat_template,
        "takes_pictures": "image" in media,
        "takes_audio": "audio" in media,
        "max_model_len": llm.max_model_len,
        "mesh": {
            "stages": parallel.pipeline_parallel_size,
            "contexts": parallel.prefill_context_parallel_size,
            "parts": parallel.tensor_parallel_size,
        },
        "disk_size": server.llm.config.cache.kv_offloading_disk_size,
        "replicas": parallel.data_parallel_size,
        "reasoning": llm.frontend.reasoning,
    }


@files.get("/ui/{name:path}")
async def file(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    if name not in _STATIC:
        raise HTTPException(404)
    has_version = name.startswith("vendor/")  # in its path, so the file never changes
    caching = "max-age=31536000, immutable" if has_version else "no-cache"
    kind = _TYPES[PurePosixPath(name).suffix]
    return Response(_STATIC[name], headers={**_HEADERS, "Content-Type": kind, "Cache-Control": caching})
