"""Transports that read the blocks of one rank of another engine."""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.cluster.secret import ClusterSecret
from quire.transfer import wire
from quire.transfer.layout import Run
from quire.transfer.messages import MOST_PIECES, Answer, Await, Data, Describe, Hello, Problem, Reached, Read
from quire.transfer.server import boot_id

Blocks = npt.NDArray[np.uint8]  # [blocks, bytes of a block]
Pairs = Sequence[tuple[int, int]]  # the number of the other rank's block, and the index of this rank's block

_BATCH_BYTES = 4 << 20  # in one answer
_ASKED = 2  # requests in flight
_BATCH_BLOCKS = 1024
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Source(Protocol):
    """A transport that reads blocks. Only one thread may use it at a time."""

    def read(self, pairs: Pairs, runs: Sequence[Run], blocks: Blocks) -> None:
        """Copy these runs of the other rank's blocks into this rank's blocks. Raises OSError or ValueError."""

    def interrupt(self) -> None:
        """Make a running call of another thread return soon."""

    def close(self) -> None: ...


class TcpSource:
    """Reads over an encrypted TCP connection."""

    def __init__(self, host: str, port: int, secret: ClusterSecret, timeout: float = wire.TIMEOUT_SECONDS) -> None:
        """Connect to a rank's server. Raises OSError."""
        self._connection = wire.Connection(host, port, secret, timeout)
        self.interrupt = self._connection.interrupt
        self.close = self._connection.close

    def hello(self) -> Hello:
        """Return the other rank's description."""
        self._connection.send(Describe())
        answer = self._receive()
        if not isinstance(answer, Hello):
            raise ValueError("it has not said what it has")
        return answer

    def read(self, pairs: Pairs, runs: Sequence[Run], blocks: Blocks) -> None:
        parts = _batches(pairs, runs)
        wanted = [(remote, length) for remote, _, length in runs]
        view = blocks.reshape(-1).data
        block_bytes = blocks.shape[1]
        unread = dict(enumerate(parts))
        for number in range(min(_ASKED, len(parts))):
            self._ask(number, parts, wanted)
        for number in range(_ASKED, len(parts) + _ASKED):
            answer = self._receive()
            part = unread.pop(answer.number, None) if isinstance(answer, Data) else None
            if part is None:
                raise ValueError("it has sent something else than what was asked for")
            if number < len(parts):
                self._ask(number, parts, wanted)
            wire.fill(_targets(view, block_bytes, part, runs), self._connection.receive_data())

    def _ask(self, number: int, parts: Sequence[Pairs], runs: list[tuple[int, int]]) -> None:
        self._connection.send(Read(number, [remote for remote, _ in parts[number]], runs))

    def wait(self, step: int, layer: int) -> Reached:
        """Wait until the layers of a step below `layer` are computed, for about a second at most."""
        self._connection.send(Await(step, layer))
        answer = self._receive()
        if not isinstance(answer, Reached):
            raise ValueError("it has not said how far the step is")
        return answer

    def _receive(self) -> Hello | Data | Reached:
        answer = self._connection.receive(_answers)
        if isinstance(answer, Problem):
            raise ValueError(answer.text)
        return answer


def _batches(pairs: Pairs, runs: Sequence[Run]) -> list[Pairs]:
    size = sum(length for *_, length in runs)
    most = max(1, min(_BATCH_BYTES // size, MOST_PIECES // len(runs), _BATCH_BLOCKS))
    return [pairs[first : first + most] for first in range(0, len(pairs), most)]


def _targets(view: memoryview, block_bytes: int, pairs: Pairs, runs: Iterable[Run]) -> Iterator[memoryview]:
    for _, index in pairs:
        for _, start, length in runs:
            yield view[index * block_bytes + start : index * block_bytes + start + length]


class MappedSource:
    """Copies from the memory of a rank on the same machine."""

    def __init__(self, hello: Hello) -> None:
        """Map the rank's memory. Raises OSError if this is impossible, for example if the rank is on another machine or
        belongs to another user."""
        file = hello.file
        block_bytes = hello.layout.block_bytes
        if file is None or not file.boot_id or file.boot_id != boot_id():
            raise FileNotFoundError("it is on another machine, or its blocks are not in the memory of a CPU")
        handle = os.open(f"/proc/{file.pid}/fd/{file.handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(handle)  # in another container, the path leads to another file
            if (info.st_dev, info.st_ino) != (file.device, file.inode):
                raise FileNotFoundError("its memory is in another container")
            if info.st_size < hello.num_blocks * block_bytes:
                raise OSError("its memory is too small")
            region = mmap.mmap(handle, hello.num_blocks * block_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        self._blocks = np.frombuffer(region, np.uint8).reshape(hello.num_blocks, block_bytes)

    def read(self, pairs: Pairs, runs: Sequence[Run], blocks: Blocks) -> None:
        for other, own in pairs:
            if not 0 < other < len(self._blocks):
                raise ValueError(f"block {other} is not one of the blocks 1 to {len(self._blocks) - 1}")
            for remote, start, length in runs:
                np.copyto(blocks[own, start : start + length], self._blocks[other, remote : remote + length])

    def interrupt(self) -> None:
        """Do nothing: `read` never waits."""

    def close(self) -> None:
        self._blocks = np.empty((0, 0), np.uint8)  # unmapped once nothing refers to it


def ask(host: str, port: int, secret: ClusterSecret, timeout: float = wire.TIMEOUT_SECONDS) -> Hello:
    """Return the description of the rank whose server listens at this address. Raises OSError or ValueError."""
    source = TcpSource(host, port, secret, timeout)
    try:
        return source.hello()
    finally:
        source.close()
