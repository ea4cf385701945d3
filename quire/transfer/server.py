"""Lets ranks of other engines read the KV blocks of this rank while it runs steps."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from quire.cluster.monitor import Connections
from quire.cluster.outbox import Outbox
from quire.cluster.secret import ClusterSecret, Gate
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.transfer import wire
from quire.transfer.layout import RankLayout
from quire.transfer.messages import (
    MOST_PIECES,
    Answer,
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

AWAIT_SECONDS = 1.0  # the longest that an Await waits before its answer
BUFFER_BYTES = 16 << 20  # of CPU memory, through which a GPU's blocks are copied
_MOST_ANSWER_BYTES = 64 << 20
_MOST_REQUESTS = 128  # answered at the same time; most of them wait for a step
_ENCRYPTING_THREADS = 4
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class BlockServer:
    """Answers readers: one thread owns the socket, others build the answers. A misbehaving reader disturbs nothing
    else.

    The server sends any block to any reader with the secret: the engines agree on which blocks may be read, and when.
    """

    def __init__(
        self,
        rows: Rows,
        layout: RankLayout,
        secret: ClusterSecret,
        host: str,
        port: int,
        *,
        name: str = "",
        handle: int | None = None,
        nixl: NixlAddress | None = None,
        clock: StepClock | None = None,
        most_connections: int = 128,
    ) -> None:
        """name: the engine's. handle: the descriptor of the memory file with the blocks, if there is one (see
        KVMemory). clock: this rank's; None if readers request only computed blocks. Raises OSError if the port cannot
        be used."""
        self._rows = rows
        self._clock = clock
        self._most_connections = most_connections
        self._num_blocks = len(rows.blocks)
        self._block_bytes = rows.block_bytes
        file = None if handle is None else shared_file(handle)
        self._hello = Hello(name, layout, self._num_blocks, file, nixl)
        self._context = zmq.Context(_ENCRYPTING_THREADS)
        self._outbox = Outbox(self._context)
        self._answers: deque[tuple[bytes, list[bytes]]] = deque()  # the reader's identity, and its frames
        self._gate = Gate(self._context, secret)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._connections = Connections(self._socket)
        try:
            address = secret.listen(self._socket, host, port, wire.MOST_FRAME_BYTES)
        except zmq.ZMQError as error:
            self._free()
            raise OSError(error.errno, error_text(error)) from error
        self.port = int(address.rpartition(":")[2])
        self._threads = ThreadPoolExecutor(_MOST_REQUESTS, "quire-kv-answer")
        self._thread = threading.Thread(target=self._run, name="quire-kv-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._outbox.close():
            self._thread.join(5)

    def _run(self) -> None:
        poller: Any = zmq.Poller()
        for socket in (self._socket, self._outbox.socket, self._connections.socket, self._gate.socket):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._outbox.socket in ready and not self._outbox.get()[0]:
                    return
                while self._answers:
                    reader, frames = self._answers.popleft()
                    for frame in frames:
                        self._socket.send_multipart([reader, frame], copy=False)  # lost if the reader has left
                if self._socket in ready:
                    self._hear(*self._socket.recv_multipart())
                if self._gate.socket in ready or self._connections.socket in ready:
                    self._connections.report(
                        "A reader of KV blocks was refused: it does not have this cluster's secret "
                        "(cluster_secret_file)"
                    )
                if self._gate.socket in ready:
                    self._admit()
        except Exception:
            logger.exception("The server of KV blocks has failed; other engines compute their prompts from now on")
        finally:
            self._free()

    def _admit(self) -> None:
        has_room = self._connections.count <= self._most_connections  # the new one is counted already
        if not self._gate.answer(self._gate.socket.recv_multipart(), has_room):
            logger.warning(
                "A reader of KV blocks was refused: there are %d connections already", self._most_connections
            )

    def _free(self) -> None:
        self._connections.close()
        self._socket.close(linger=0)
        self._gate.socket.close()
        self._outbox.close()
        self._outbox.socket.close()
        self._context.term()

    def _hear(self, reader: bytes, *frames: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the server is being closed
            self._threads.submit(self._serve, reader, b"".join(frames))

    def _serve(self, reader: bytes, body: bytes) -> None:
        answer: Answer
        data: list[bytes] = []
        try:
            request = _requests.decode(body)
            answer = self._answer(request)
            if isinstance(request, Read):
                data = list(self._data(request))
        except Exception as error:  # ValueError: the request is invalid
            logger.warning("A request for KV blocks was refused: %s", error_text(error))
            answer = Problem(error_text(error))
        self._answers.append((reader, [msgspec.msgpack.encode(answer), *data]))
        self._outbox.put(b"answer", b"")

    def _answer(self, request: Request) -> Answer:
        """Return the answer to a request. Raises ValueError if the request is invalid."""
        if isinstance(request, Describe):
            return self._hello
        if isinstance(request, Read):
            self._check(request)
            return Data(request.number)
        if self._clock is None:
            return Reached(request.layer, 0)
        return Reached(*self._clock.wait(request.step, request.layer, AWAIT_SECONDS))

    def _data(self, request: Read) -> Iterator[bytes]:
        ids = request.block_ids
        if isinstance(self._rows, HostRows) and self._rows.are_adjacent:
            yield from wire.frames(_runs(self._rows.blocks, ids, request))
            return
        buffer = block_buffer(self._rows, len(ids))
        span = slice(min(start for start, _ in request.runs), max(start + length for start, length in request.runs))
        for first in range(0, len(ids), len(buffer)):
            part = ids[first : first + len(buffer)]
            self._rows.read(part, list(buffer[: len(part)]), span)
            yield from wire.frames(_runs(buffer, range(len(part)), request))

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
        num_bytes = len(request.block_ids) * sum(length for _, length in request.runs)
        if num_bytes > max(_MOST_ANSWER_BYTES, self._block_bytes):
            raise ValueError("it asks for too much at once")
        if not self._rows.blocks.untyped_storage().nbytes():
            raise ValueError("the engine sleeps, and has no blocks")


def _runs(blocks: Tensor, indices: Iterable[int], request: Read) -> Iterator[memoryview]:
    """Yield the requested runs of these blocks."""
    view = blocks.numpy().reshape(-1).data
    size = blocks.shape[1]
    for index in indices:
        for start, length in request.runs:
            yield view[index * size + start : index * size + start + length]


def block_buffer(rows: Rows, most: int) -> Tensor:
    """Allocate CPU memory for at most `most` blocks: uint8 [number, bytes of a block]. Buffers for a GPU's blocks are
    pinned; torch caches pinned memory for later buffers."""
    number = max(1, min(most, BUFFER_BYTES // rows.block_bytes))
    return torch.empty(number, rows.block_bytes, dtype=torch.uint8, pin_memory=rows.blocks.is_cuda)


def boot_id() -> str:
    """Return an id that is unique to this machine and to its last boot; empty if the system provides none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def shared_file(handle: int) -> SharedFile:
    info = os.fstat(handle)
    return SharedFile(boot_id(), os.getpid(), handle, info.st_dev, info.st_ino)
