"""Decides which of several cores, or of several servers (quire.router), gets a request."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.messages.engine import EngineCoreRequest
from quire.messages.transfers import replica_of

WEIGHT_OF_WAITING = 4  # a waiting request counts as much as four running ones
# With prefixes, a core is eligible if its load is at most the mean load times the first value plus the second.
LEEWAY = (1.25, 2 * WEIGHT_OF_WAITING)
PIECE = 64  # tokens; prefixes are compared in pieces of this size
MAX_PIECES = 1 << 18

Request = TypeVar("Request")


@dataclass
class _Core:
    """A core's last report, and how many requests it was sent and has reported as received."""

    waiting: int = 0
    running: int = 0
    sent: int = 0
    received: int = 0

    @property
    def load(self) -> int:
        return WEIGHT_OF_WAITING * (self.waiting + self.sent - self.received) + self.running


class Router(Generic[Request]):
    """Sends each request to the core with the lowest load, `4 * waiting + running`. Requests in transit to a core count
    as waiting there. Cores with equal loads take turns.

    pieces: returns a hash for each piece of a request's prompt, including everything before the piece. If given, the
    router prefers the cores with the longest prefix of the prompt among those whose loads are not far above the mean.
    first: the core whose turn is first. prefixes: tracks the prefixes that each core has; by default, those that were
    sent to it.
    """

    def __init__(
        self,
        num_cores: int,
        pieces: Callable[[Request], Sequence[int]] | None = None,
        first: int = 0,
        prefixes: "Prefixes | None" = None,
    ) -> None:
        self._cores = [_Core() for _ in range(num_cores)]
        self._next = first % num_cores
        self._pieces = pieces
        self._prefixes = None if pieces is None else prefixes or SentPrefixes()

    def route(self, request: Request, ready: Sequence[int], core: int | None = None) -> int:
        """Return the core to send the request to. ready: the numbers of the cores to choose from. core: one of them, if
        already chosen."""
        pieces = [] if self._pieces is None else self._pieces(request)
        loads = [state.load for state in self._cores]
        if core is None:
            count = len(loads)
            first = self._next
            if self._prefixes is not None:
                factor, margin = LEEWAY
                most = factor * sum(loads[rank] for rank in ready) / len(ready) + margin
                ready = self._prefixes.longest(pieces, [rank for rank in ready if loads[rank] <= most])
            core = min(ready, key=lambda rank: (loads[rank], (rank - first) % count))
            self._next = (core + 1) % count
        if self._prefixes is not None:
            self._prefixes.add(pieces, core)
        self._cores[core].sent += 1
        return core

    def report(self, core: int, waiting: int, running: int, received: int) -> None:
        """Update a core's state. received: the number of requests that it has received from this router."""
        state = self._cores[core]
        state.waiting = waiting
        state.running = running
        state.received = received

    def forget(self, core: int) -> None:
        """Forget a lost core. Its replacement, with an empty cache, will have its number."""
        self._cores[core] = _Core()
        if self._prefixes is not None:
            self._prefixes.forget(core)


def producing_core(request: EngineCoreRequest, num_cores: int, core: int | None) -> int | None:
    """Return the core at which other engines look for the blocks of a request's prompt; if they do not, `core`."""
    transfer = request.transfer
    return replica_of(transfer.transfer_id, num_cores) if transfer and transfer.do_remote_decode else core


class Prefixes(ABC):
    """Tracks which cores have which pieces of prompts."""

    def __init__(self) -> None:
        self._cores: OrderedDict[int, int] = OrderedDict()  # a piece's hash -> a bit for each core

    def longest(self, pieces: Sequence[int], ready: list[int]) -> list[int]:
        """Return those ready cores that have the longest prefix of a prompt; all of them if none has any."""
        found = sum(1 << core for core in ready)
        for piece in pieces:
            here = found & self._cores.get(piece, 0)
            if not here:
                break
            found = here
        return [core for core in ready if found >> core & 1]

    @abstractmethod
    def add(self, pieces: Sequence[int], core: int) -> None:
        """Record that a prompt is sent to a core."""

    @abstractmethod
    def forget(self, core: int) -> None:
        """Record that a core has lost all its pieces."""


class SentPrefixes(Prefixes):
    """Assumes that a core has what was sent to it. The least recently seen pieces are forgotten."""

    def add(self, pieces: Sequence[int], core: int) -> None:
        for piece in reversed(pieces):  # the first ones are kept longest, since the others are useless without them
            self._cores[piece] = self._cores.get(piece, 0) | 1 << core
            self._cores.move_to_end(piece)
        while len(self._cores) > MAX_PIECES:
            self._cores.popitem(last=False)

    def forget(self, core: int) -> None:
        for piece in self._cores:
            self._cores[piece] &= ~(1 << core)


def token_pieces(request: EngineCoreRequest) -> list[int]:
    """Return the hash of each full piece of the prompt, including everything before it."""
    tokens = request.prompt_token_ids
    piece = hash((request.cache_salt, request.adapter and request.adapter.key))
    hashes = []
    for end in range(PIECE, len(tokens) + 1, PIECE):
        piece = hash((piece, *tokens[end - PIECE : end]))
        hashes.append(piece)
    return hashes
