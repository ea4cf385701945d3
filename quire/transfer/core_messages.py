"""The messages between a consumer's core and a producer's core, encoded with msgpack."""

from array import array
from hashlib import sha256

import msgspec

from quire.messages.engine import EngineCoreRequest
from quire.messages.transfers import Peer

PROTOCOL = 5  # increment it when the meaning of a message changes

# ---- from the consumer


class Fetch(msgspec.Struct, array_like=True, tag=True):
    """Requests the blocks of a prompt. number: identifies the fetch, chosen by the consumer. digest: the prompt's, see
    `digest`. starts: the index of the first block needed of each KV group. facts: properties that must be the same in
    both engines, by name."""

    number: int
    transfer_id: str
    digest: bytes
    starts: list[int]
    facts: dict[str, str]


class Drop(msgspec.Struct, array_like=True, tag=True):
    """Ends a fetch: the consumer has read the offered blocks, or no longer needs them."""

    number: int


class Beat(msgspec.Struct, array_like=True, tag=True):
    """A consumer's heartbeat. sent_at: on its own clock. open: the numbers of the fetches that it has not dropped."""

    sent_at: float
    open: list[int]


ToProducer = Fetch | Drop | Beat

# ---- from the producer


class Offer(msgspec.Struct, array_like=True, tag=True):
    """Blocks that the consumer may read until it drops the fetch: the pool's block block_ids[i] is the prompt's block
    indices[i] in KV group groups[i]. step: the producer's step that computes the last of these blocks. is_last: no
    further blocks will be offered."""

    number: int
    peer: Peer
    groups: list[int]
    indices: list[int]
    block_ids: list[int]
    step: int
    is_last: bool

    def __post_init__(self) -> None:
        if not len(self.groups) == len(self.indices) == len(self.block_ids):
            raise ValueError("groups, indices and block_ids must have the same length")


class Gone(msgspec.Struct, array_like=True, tag=True):
    """No more blocks will be offered for a fetch. differs: the engines are incompatible, which only an operator can
    fix."""

    number: int
    reason: str
    differs: bool = False


class Elsewhere(msgspec.Struct, array_like=True, tag=True):
    """Another replica of this producer computes the prompt of a fetch. It listens at the same address, at `port`."""

    number: int
    port: int


class BeatBack(msgspec.Struct, array_like=True, tag=True):
    """The reply to a beat. num_sent: for each fetch of the beat, the number of messages that the producer sent for it
    before this reply; -1 if it holds no blocks for the fetch."""

    sent_at: float
    num_sent: list[int]


ToConsumer = Offer | Gone | Elsewhere | BeatBack


def digest(request: EngineCoreRequest) -> bytes:
    """Return a digest of everything in a request that affects the KV blocks of its prompt."""
    adapter = None if request.adapter is None else request.adapter.name
    other = msgspec.msgpack.encode((request.cache_salt, adapter))
    return sha256(array("i", request.prompt_token_ids).tobytes() + other).digest()
