"""Replicas that share experts. When one of them is lost, all are restarted with a new rendezvous."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Protocol

from quire.messages.engine import CoreDied, CoreEvent, CoreLost, RendezvousPlace

_HOST = "127.0.0.1"


class Rendezvous(Protocol):
    """Provides the place where the replicas meet. Each start of all replicas uses a new place."""

    def place(self, replica: int) -> tuple[RendezvousPlace, socket.socket | None]:
        """Return the arguments `place` and `listener` of `run_core`."""

    def end(self) -> None:
        """Called when the processes of this machine's replicas have ended and will be restarted."""

    async def begin(self) -> None:
        """Wait until the next place is known."""


class LocalRendezvous(Rendezvous):
    """All replicas are on this machine, and replica 0 provides the place."""

    def __init__(self) -> None:
        self._listener, self._key = socket.create_server((_HOST, 0)), secrets.token_bytes(32)

    def place(self, replica: int) -> tuple[RendezvousPlace, socket.socket | None]:
        address = f"{_HOST}:{self._listener.getsockname()[1]}"
        return RendezvousPlace(replica, address, _HOST, self._key), self._listener if replica == 0 else None

    def end(self) -> None:
        self._listener.close()
        self._listener = socket.create_server((_HOST, 0))

    async def begin(self) -> None:
        """Return at once: the place is known."""


class ReplicaGroup:
    """The shared state of this machine's replicas. lost: why all of them are lost, and whether they are given up; None
    unless one is lost and the other processes have not ended yet."""

    def __init__(self, here: range, everyone: range, rendezvous: Rendezvous) -> None:
        """here: the replicas of this machine. everyone: the replicas whose losses are reported."""
        self.here = here
        self._everyone = everyone
        self.rendezvous = rendezvous
        self._all_ended = asyncio.Barrier(len(here)) if here else None
        self.lost: tuple[CoreDied, bool] | None = None

    def lose(self, replica: int, died: CoreDied, given_up: bool, tell: Callable[[CoreEvent], None]) -> bool:
        """Report that all replicas are lost when one is, so that none receives the requests of another. Returns whether
        they are given up, which depends on the first loss."""
        if self.lost is not None:
            return self.lost[1]
        reason = f"replica {replica}, with which it shares experts, was lost: {died.reason}"
        self.lost = CoreDied(reason, died.by_user, silent=True), given_up
        tell(CoreLost(replica, died, given_up))
        for other in self._everyone:
            if other != replica:
                tell(CoreLost(other, self.lost[0], given_up))
        if self._all_ended is None and not given_up:
            self._end()
        return given_up

    async def end(self) -> None:
        """Wait until the processes of all replicas of this machine have ended."""
        assert self._all_ended is not None
        if await self._all_ended.wait() == 0:
            self._end()
        await self._all_ended.wait()

    def _end(self) -> None:
        self.lost = None
        self.rendezvous.end()
