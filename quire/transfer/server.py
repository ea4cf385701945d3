"""Lets ranks of other engines read the KV blocks of this rank, beside the steps."""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.transfer import wire
from quire.transfer.layout import RankLayout
from quire.transfer.messages import (
    MOST_PIECES,
    Await,
    Data,
    Describe,
    Hello,
    NixlAddress,
    Problem,
    Reached,
    Read,
    Request,
    SharedFile,
)
from quire.worker.kv_transfer import HostRows, Rows
from quire.worker.step_clock import StepClock

AWAIT_SECONDS = 1.0  # until it is said how far a step is
BUFFER_BYTES = 16 << 20  # of CPU memory, through which the blocks of a GPU go
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class BlockServer:
    """Answers on a thread for each connection. Nothing that a client sends or omits disturbs anything else.

    Which blocks may be read when is up to the engines: the server gives whoever knows the secret any block.
    """

    def __init__(  # noqa: PLR0913  # assembles its parts
        self,
        rows: Rows,
        layout: RankLayout,
        secret: bytes,
        host: str,
        port: int,
        *,
        name: str = "",
        handle: int | None = None,
        nixl: NixlAddress | None = None,
        clock: StepClock | None = None,
        most_connections: int = 128,
        handshake: float = wire.HANDSHAKE_SECONDS,
        timeout: float = wire.TIMEOUT_SECONDS,
    ) -> None:
        """name: of the engine. handle: of the file in memory in which the blocks lie, if they do (see KVMemory).
        clock: of this rank; None if all that is asked for has been computed. Raises OSError if the port cannot be
        used."""
        self._rows = rows
        self._secret = secret
        self._clock = clock
        self._most = most_connections
        self._handshake = handshake
        self._timeout = timeout
        self._num_blocks, self._block_bytes = rows.blocks.shape
        file = None if handle is None else shared_file(handle)
        self._hello = Hello(name, layout, self._num_blocks, file, nixl)
        self._listener = wire.listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._links: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="quire-kv-server", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for link in self._links:
                wire.shut(link)
        wire.shut(self._listener)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link, address = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("A connection for KV blocks cannot be accepted: %s", error_text(error))
                time.sleep(1.0)
                continue
            with self._lock:
                is_welcome = len(self._links) < self._most and not self._closed
                if is_welcome:
                    self._links.add(link)
            try:
                if not is_welcome:
                    raise RuntimeError(f"there are {self._most} connections already")
                threading.Thread(target=self._serve, args=(link, address[0]), daemon=True).start()
            except RuntimeError as error:  # or the system has no more threads
                self._forget(link)
                logger.warning("A connection for KV blocks from %s is refused: %s", address[0], error_text(error))

    def _forget(self, link: socket.socket) -> None:
        with self._lock:
            self._links.discard(link)
            link.close()

    def _serve(self, link: socket.socket, client: str) -> None:
        try:
            connection = wire.accept(link, self._secret, self._handshake, self._timeout)
            while (request := connection.receive(_requests, waits=True)) is not None:
                self._answer(connection, request)
        except Exception as error:
            if not self._closed:
                logger.warning("A connection for KV blocks from %s has ended: %s", client, error_text(error))
        finally:
            self._forget(link)

    def _answer(self, connection: wire.Connection, request: Request) -> None:
        """Raises OSError, and ValueError if the request is wrong."""
        if isinstance(request, Describe):
            connection.send(self._hello)
            return
        if isinstance(request, Await):
            layer = request.layer
            ticks = 0
            if self._clock is not None:
                layer, ticks = self._clock.wait(request.step, layer, AWAIT_SECONDS)
            connection.send(Reached(layer, ticks))
            return
        try:
            self._check(request)
        except ValueError as error:
            connection.send(Problem(error_text(error)))
            raise
        ids = request.block_ids
        data = Data(len(ids) * sum(length for _, length in request.runs))
        if isinstance(self._rows, HostRows):
            connection.send(data, _runs(self._rows.blocks, ids, request))
            return
        connection.send(data)
        buffer = block_buffer(self._rows.blocks, len(ids))
        span = slice(min(start for start, _ in request.runs), max(start + length for start, length in request.runs))
        for first in range(0, len(ids), len(buffer)):
            part = ids[first : first + len(buffer)]
            self._rows.read(part, list(buffer[: len(part)]), span)
            connection.send_bytes(_runs(buffer, range(len(part)), request))

    def _check(self, request: Read) -> None:
        if len(request.block_ids) * len(request.runs) > MOST_PIECES:
            raise ValueError("it asks for too much at once")
        for block_id in request.block_ids:
            if not 0 < block_id < self._num_blocks:
                raise ValueError(f"block {block_id} is not one of the blocks 1 to {self._num_blocks - 1}")
        if not request.runs:
            raise ValueError("it asks for no bytes")
        for start, length in request.runs:
            if start < 0 or length <= 0 or start + length > self._block_bytes:
                raise ValueError(f"bytes {start} to {start + length} are not in a block of {self._block_bytes}")
        if not self._rows.blocks.untyped_storage().nbytes():
            raise ValueError("the engine sleeps, and has no blocks")


def _runs(blocks: Tensor, indices: Iterable[int], request: Read) -> Iterator[memoryview]:
    """The runs that are asked for, of these blocks."""
    view = blocks.numpy().reshape(-1).data
    size = blocks.shape[1]
    for index in indices:
        for start, length in request.runs:
            yield view[index * size + start : index * size + start + length]


def block_buffer(blocks: Tensor, most: int) -> Tensor:
    """CPU memory for some of the blocks, at most `most`: uint8 [number, bytes of a block]. torch keeps the memory of
    buffers of GPUs, which is pinned, for the next ones."""
    number = max(1, min(most, BUFFER_BYTES // blocks.shape[1]))
    return torch.empty(number, blocks.shape[1], dtype=torch.uint8, pin_memory=blocks.is_cuda)


def boot_id() -> str:
    """Another one on each machine, and after each of its starts; empty if the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def shared_file(handle: int) -> SharedFile:
    info = os.fstat(handle)
    return SharedFile(boot_id(), os.getpid(), handle, info.st_dev, info.st_ino)
