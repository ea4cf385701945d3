"""What a consumer's core and a producer's core say to each other, in msgpack."""

from array import array
from hashlib import sha256

import msgspec

from quire.messages.engine import EngineCoreRequest
from quire.messages.transfers import Peer

PROTOCOL = 4  # raise it when a message changes its meaning

# ---- from the consumer


class Fetch(msgspec.Struct, array_like=True, tag=True):
    """Asks for the blocks of a prompt. number: of the consumer's own choice. digest: of the prompt, see `digest`.
    starts: for each KV group, the index of the first block that is wanted. facts: what must be the same at both ends,
    by name."""

    number: int
    transfer_id: str
    digest: bytes
    starts: list[int]
    facts: dict[str, str]


class Drop(msgspec.Struct, array_like=True, tag=True):
    """The consumer has read what it was offered for a fetch, or wants no more of it."""

    number: int


class Beat(msgspec.Struct, array_like=True, tag=True):
    """The consumer is there. sent_at: by its own clock. open: the numbers of the fetches that it has not dropped."""

    sent_at: float
    open: list[int]


ToProducer = Fetch | Drop | Beat

# ---- from the producer


class Offer(msgspec.Struct, array_like=True, tag=True):
    """Blocks that the consumer may read until it drops the fetch: block block_ids[i] is number indices[i] of the prompt
    in KV group groups[i]. step: of the producer, in which the last of them are computed. is_last: no more will come."""

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
    """No more blocks will come for a fetch. differs: engines do not fit together, which only an operator can change."""

    number: int
    reason: str
    differs: bool = False


class BeatBack(msgspec.Struct, array_like=True, tag=True):
    """The answer to a beat. num_sent: for each of its fetches, how many messages the producer has sent for it before
    this one; -1 if it holds nothing for the fetch."""

    sent_at: float
    num_sent: list[int]


ToConsumer = Offer | Gone | BeatBack


def digest(request: EngineCoreRequest) -> bytes:
    """Of everything in a request that the blocks of its prompt depend on."""
    adapter = None if request.adapter is None else request.adapter.name
    other = msgspec.msgpack.encode((request.cache_salt, adapter))
    return sha256(array("i", request.prompt_token_ids).tobytes() + other).digest()
