"""Downloads for /api/pull: `quire pull --json` in a separate process, at most one per model at a time."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from quire.config.engine import ModelConfig
from quire.observability.logging import logger
from quire.server.errors import ApiError

MAX_DOWNLOADS = 2  # at the same time
_MOST_LINE = 64 << 10  # bytes
Line = dict[str, Any]


class Downloads:
    """The running downloads, by model name. Several requests for a model follow the same download."""

    def __init__(self, options: ModelConfig) -> None:
        self._options = options
        self._running: dict[str, _Download] = {}

    async def pull(self, name: str) -> AsyncGenerator[Line]:
        """Yield the lines of a download until it succeeds. The download is stopped when no request follows it. Raises
        ApiError."""
        while (download := self._running.get(name)) is not None and download.is_ending:
            await asyncio.wait([download.task])
        if download is None:
            if len(self._running) >= MAX_DOWNLOADS:
                message = f"{MAX_DOWNLOADS} models are being downloaded; try again later"
                raise ApiError(503, message, code="server_overloaded", headers={"Retry-After": "60"})
            download = self._running[name] = _Download(self, name)
            download.task.add_done_callback(lambda _: self._running.pop(name))
        async with aclosing(download.follow()) as lines:
            async for line in lines:
                yield line

    async def run(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start a command of `quire` that uses the hub's cache."""
        token = self._options.hf_token
        folder = self._options.download_dir
        if folder is not None:
            arguments = (*arguments, "--download-dir", folder)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire",
            *arguments,
            limit=_MOST_LINE,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **({"HF_TOKEN": token} if isinstance(token, str) else {})},
        )

    async def output_of(self, *arguments: str) -> str:
        """Return the output of a command. Raises ApiError if it fails."""
        process = await self.run(*arguments)
        output, error = await process.communicate()
        if process.returncode:
            raise failure(error)
        return output.decode(errors="replace")


def failure(error: bytes) -> ApiError:
    """error: a command's output on standard error."""
    lines = error.decode(errors="replace").strip().splitlines()
    message = lines[-1].removeprefix("quire: error: ") if lines else "the command was killed"
    return ApiError(400, message, param="model")


class _Download:
    """A running download, and the last line about each of its files. task: runs the download, including its cleanup."""

    def __init__(self, downloads: Downloads, name: str) -> None:
        self._lines: dict[str, tuple[int, Line]] = {}  # by file or status: (number, line)
        self._count = self._followers = 0
        self._news = asyncio.Event()
        self.is_ending = False
        self.task = asyncio.create_task(self._run(downloads, name))
        self.task.add_done_callback(lambda _: self._tell())

    async def follow(self) -> AsyncGenerator[Line]:
        seen = 0
        self._followers += 1
        try:
            while True:
                is_done = self.task.done()
                news = self._news
                for number, line in sorted(self._lines.values(), key=lambda entry: entry[0]):
                    if number > seen:
                        seen = number
                        yield line
                if is_done:
                    self.task.result()
                    return
                await news.wait()
        finally:
            self._followers -= 1
            if not self._followers and not self.task.done():
                self.is_ending = True
                self.task.cancel()

    async def _run(self, downloads: Downloads, name: str) -> None:
        """Raises ApiError."""
        process = await downloads.run("pull", name, "--json")
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        try:
            async for text in process.stdout:
                self._add(msgspec.json.decode(text))
            if await process.wait():
                raise failure(await errors)
            logger.info("Downloaded %s for a client", name)
        except ValueError as error:  # not JSON, or an endless line
            raise ApiError(500, "quire pull printed something else than its progress") from error
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()  # it removes its incomplete files
                await process.wait()
            errors.cancel()

    def _add(self, line: Line) -> None:
        self._count += 1
        self._lines[str(line.get("digest") or line.get("status"))] = self._count, line
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
