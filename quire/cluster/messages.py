"""The messages between machines of a cluster, in msgpack. Payloads are messages of the layer above."""

import msgspec

PROTOCOL = 1  # increase when the meaning of a message changes
BEAT_SECONDS = 1.0  # time between two heartbeats, in both directions


class Beat(msgspec.Struct, array_like=True, tag=True):
    """A heartbeat."""


class Payload(msgspec.Struct, array_like=True, tag=True):
    body: bytes


class Leave(msgspec.Struct, array_like=True, tag=True):
    """The sender has ended the session, or has no session with the receiver."""

    reason: str


# ---- from a node to the head


class Join(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Requests a session. New fields may only be added at the end, so that all versions of Quire understand it.

    first, count: the range of the node's ranks or replicas. node: a random number of the node's process. host: the
    node's address. facts: values that must equal the head's. versions: values that should.
    """

    first: int
    count: int
    node: int
    host: str
    facts: dict[str, str]
    versions: dict[str, str] = {}


# ---- from the head to a node


class Welcome(msgspec.Struct, array_like=True, tag=True):
    """The session begins. body: the message of the layer above to a new node."""

    body: bytes


class Refused(msgspec.Struct, array_like=True, tag=True):
    """The node cannot join, and trying again would not help."""

    reason: str


# ---- from any process with the secret to the head: the store in which ranks exchange addresses. Each request gets one
# reply.


class Put(msgspec.Struct, array_like=True, tag=True):
    key: str
    value: bytes


class Get(msgspec.Struct, array_like=True, tag=True):
    """Get a value. The reply is sent when the key exists."""

    key: str


class Has(msgspec.Struct, array_like=True, tag=True):
    """Check keys. The reply is b"1" if all keys exist, otherwise b""."""

    keys: list[str]


class Add(msgspec.Struct, array_like=True, tag=True):
    """Add to a number, which starts at 0. The reply is the sum as decimal digits."""

    key: str
    number: int


class Delete(msgspec.Struct, array_like=True, tag=True):
    """Delete a key. The reply is b"1" if the key existed, otherwise b""."""

    key: str


class Answer(msgspec.Struct, array_like=True, tag=True):
    value: bytes


StoreRequest = Put | Get | Has | Add | Delete
ToHead = Join | Beat | Payload | Leave | StoreRequest
ToNode = Welcome | Refused | Beat | Payload | Leave | Answer
