"""What a reader of KV blocks asks a rank's server, and what the server answers. Both are msgpack with fixed types."""

import msgspec

from quire.transfer.layout import RankLayout

MOST_PIECES = 1 << 16  # runs of all blocks that one request may name


class Describe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say what you have. The answer is Hello."""


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send these runs of bytes of each of these blocks: offset in the block, and length. number: of the reader's own
    choice. The answer is Data."""

    number: int
    block_ids: list[int]
    runs: list[tuple[int, int]]


class Await(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say when the rank has computed its layers below `layer` of a step, or after a while, how far it is. The answer is
    Reached."""

    step: int
    layer: int


class SharedFile(msgspec.Struct, frozen=True, array_like=True):
    """The file in memory that is the KV cache, as its machine's other processes find it: /proc/PID/fd/HANDLE."""

    boot_id: str
    pid: int
    handle: int
    device: int
    inode: int


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where NIXL finds the KV cache. memory: "DRAM" or "VRAM". number: of the GPU."""

    agent: bytes
    memory: str
    number: int
    address: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """name: of the engine, another one after each start. nixl: None if the rank has no NIXL."""

    name: str
    layout: RankLayout
    num_blocks: int
    file: SharedFile | None = None
    nixl: NixlAddress | None = None


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The bytes of a Read follow it: of each block, its runs. Answers may overtake each other."""

    number: int


class Reached(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has computed its layers below `layer` of the step; NOT_RUN if the step was not run. ticks: another
    number if the rank has gone on with any step meanwhile."""

    layer: int
    ticks: int


class Problem(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request was wrong."""

    text: str


Request = Describe | Read | Await
Answer = Hello | Data | Reached | Problem
