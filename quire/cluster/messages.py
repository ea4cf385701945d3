"""What machines of a cluster say to each other, in msgpack. Payloads are messages of those who use the connection."""

import msgspec

PROTOCOL = 1  # raise it when a message changes its meaning
BEAT_SECONDS = 1.0  # time between two heartbeats, in both directions


class Beat(msgspec.Struct, array_like=True, tag=True):
    """A heartbeat."""


class Payload(msgspec.Struct, array_like=True, tag=True):
    body: bytes


class Leave(msgspec.Struct, array_like=True, tag=True):
    """The sender has ended the session, or never had one with the receiver."""

    reason: str


# ---- from a node to the head


class Join(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Asks for a session. It may only get more fields at its end, so that any two versions of Quire understand it.

    first, count: the numbers of the ranks or replicas that the node brings. node: a random number of the node's
    process. host: the node's address. facts: what must be the same at the head. versions: what should be.
    """

    first: int
    count: int
    node: int
    host: str
    facts: dict[str, str]
    versions: dict[str, str] = {}


# ---- from the head to a node


class Welcome(msgspec.Struct, array_like=True, tag=True):
    """The session begins. body: what those who use the connection tell a new node."""

    body: bytes


class Refused(msgspec.Struct, array_like=True, tag=True):
    """The node cannot take part, and asking again would not help."""

    reason: str


# ---- from any process that knows the secret to the head: the store at which ranks exchange addresses. Each request has
# one answer.


class Put(msgspec.Struct, array_like=True, tag=True):
    key: str
    value: bytes


class Get(msgspec.Struct, array_like=True, tag=True):
    """Answered when the key is there."""

    key: str


class Has(msgspec.Struct, array_like=True, tag=True):
    """Answered with b"1" if all keys are there, else with b""."""

    keys: list[str]


class Add(msgspec.Struct, array_like=True, tag=True):
    """Add to a number, which begins as 0. Answered with the sum, in digits."""

    key: str
    number: int


class Delete(msgspec.Struct, array_like=True, tag=True):
    """Answered with b"1" if the key was there, else with b""."""

    key: str


class Answer(msgspec.Struct, array_like=True, tag=True):
    value: bytes


StoreRequest = Put | Get | Has | Add | Delete
ToHead = Join | Beat | Payload | Leave | StoreRequest
ToNode = Welcome | Refused | Beat | Payload | Leave | Answer
