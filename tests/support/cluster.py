"""A head and nodes of a cluster in threads, which write down what they are told."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.cluster.head import Head
from quire.cluster.messages import Join
from quire.cluster.node import Node
from quire.cluster.secret import ClusterSecret
from support.waiting import LONGEST

SECRET = ClusterSecret(b"a secret of the tests that is long enough")
FACTS = {"max_model_len": "512", "Quire's version": "1.0"}


class Listening:
    """A head for ranks 2 to 5. events: what it was told of nodes, in order."""

    def __init__(self, port: int = 0, **facts: str) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.head = Head(SECRET, "127.0.0.1", port, range(2, 6), "rank", {**FACTS, **facts}, {"torch": "2.13"})
        self.head.start(self)

    def joined(self, members: range, host: str) -> bytes:
        self.events.put(("joined", members))
        return b"welcome"

    def received(self, members: range, body: bytes) -> None:
        self.events.put(("received", members, body))
        self.head.send(members, b"you said " + body)

    def lost(self, members: range, reason: str) -> None:
        self.events.put(("lost", members, reason))

    def next(self, seconds: float = LONGEST) -> tuple[Any, ...]:
        return self.events.get(timeout=seconds)


class Joining:
    """A node that has some ranks. events: what it was told. problem: the error with which it ended."""

    def __init__(
        self,
        address: str,
        members: range,
        secret: ClusterSecret = SECRET,
        facts: dict[str, str] = FACTS,
        versions: dict[str, str] | None = None,
    ) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.problem: Exception | None = None
        join = Join(
            first=members.start,
            count=len(members),
            node=secrets.randbits(62),
            host="10.0.0.7",
            facts=facts,
            versions={"torch": "2.13"} if versions is None else versions,
        )
        self.node = Node(secret, address, join)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.node.run(self)
        except Exception as error:
            self.problem = error

    def begin(self, body: bytes) -> None:
        self.events.put(("begin", body))

    def received(self, body: bytes) -> None:
        self.events.put(("received", body))

    def end(self) -> None:
        self.events.put(("end",))

    def next(self, seconds: float = LONGEST) -> tuple[Any, ...]:
        return self.events.get(timeout=seconds)

    def ended(self) -> Exception | None:
        """The error with which it has ended, or None."""
        self._thread.join(LONGEST)
        assert not self._thread.is_alive()
        return self.problem

    def stop(self) -> None:
        self.node.stop()
        self._thread.join(LONGEST)


@contextmanager
def listening(port: int = 0, **facts: str) -> Iterator[Listening]:
    head = Listening(port, **facts)
    try:
        yield head
    finally:
        head.head.close()


@contextmanager
def joining(address: str, members: range, **options: Any) -> Iterator[Joining]:
    node = Joining(address, members, **options)
    try:
        yield node
    finally:
        node.stop()
