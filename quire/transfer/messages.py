"""The messages between a reader of KV blocks and a rank's server, encoded with msgpack."""

import msgspec

from quire.transfer.layout import RankLayout

MOST_PIECES = 1 << 16  # runs that one request may name, over all its blocks


class Describe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests a description of the rank. The answer is Hello."""


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests the same runs of bytes of several blocks. runs: offset in the block, and length. number: identifies the
    request, chosen by the reader. The answer is Data."""

    number: int
    block_ids: list[int]
    runs: list[tuple[int, int]]


class Await(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Waits until the rank has computed its layers below `layer` of a step, for a limited time. The answer is
    Reached."""

    step: int
    layer: int


class SharedFile(msgspec.Struct, frozen=True, array_like=True):
    """The memory file that contains the KV cache. Processes on the same machine open it as /proc/PID/fd/HANDLE."""

    boot_id: str
    pid: int
    handle: int
    device: int
    inode: int


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where NIXL finds the KV cache. memory: "DRAM" or "VRAM". number: the GPU's index."""

    agent: bytes
    memory: str
    number: int
    address: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Describes a rank. name: the engine's, a new one after each start. nixl: None if the rank has no NIXL."""

    name: str
    layout: RankLayout
    num_blocks: int
    file: SharedFile | None = None
    nixl: NixlAddress | None = None


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Precedes the bytes that a Read requested: block by block, the runs of each. Answers may arrive out of order."""

    number: int


class Reached(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has computed its layers below `layer` of the step; NOT_RUN if the step was not run. ticks: differs from
    the previous answer's if the rank has made progress with any step."""

    layer: int
    ticks: int


class Problem(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request was invalid."""

    text: str


Request = Describe | Read | Await
Answer = Hello | Data | Reached | Problem
