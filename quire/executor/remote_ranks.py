"""Ranks on other machines, where agents start them (executor/agent.py)."""

import time
from collections.abc import Callable, Sequence

import msgspec

from quire.cluster.head import Head, named
from quire.cluster.secret import ClusterSecret
from quire.executor import messages
from quire.executor.agreement import versions
from quire.executor.ranks import Observer, Ranks
from quire.messages.errors import error_text
from quire.observability.logging import logger

JOIN_SECONDS = 600.0  # time limit for all agents to join
_reports = msgspec.msgpack.Decoder(messages.AgentReport)


class RemoteRanks(Ranks):
    """The ranks of one agent."""

    def __init__(self, numbers: range, agents: "Agents") -> None:
        self.numbers = numbers
        self._agents = agents

    def order(self, order: bytes, ranks: range) -> None:
        first = max(ranks.start, self.numbers.start)
        stop = min(ranks.stop, self.numbers.stop)
        if first < stop:
            self._agents.send(self.numbers, messages.encode(messages.ForRanks(first, stop, order)))

    def end(self, patience: float) -> None:
        """Do nothing: the agents end the ranks when the head ends."""


class Agents:
    """The agents of an executor's machines. They join here, start their ranks at once, and forward the ranks' messages.

    If one of them is lost, the executor has failed.
    """

    def __init__(
        self, secret: ClusterSecret, host: str, port: int, members: range, facts: dict[str, str], observer: Observer
    ) -> None:
        """members: the numbers of all ranks on other machines. facts: see `agreement.facts`. Raises ConfigError if
        listening on host:port fails."""
        self._begin = b""
        self._observer = observer
        self._head = Head(secret, host, port, members, "rank", facts, versions())
        self.address = self._head.address
        self.send = self._head.send
        self.close = self._head.close

    def start(self, begin: messages.Begin) -> None:
        """Start accepting agents. begin: what each of them is told when it joins."""
        self._begin = messages.encode(begin)
        self._head.start(self)

    def wait(self, machines: Sequence[range], check: Callable[[], None]) -> None:
        """Wait until all agents have joined. machines: the ranks of each machine. check: called repeatedly, and may
        raise. Raises RuntimeError if an agent does not join in time."""
        deadline = time.monotonic() + JOIN_SECONDS
        waiting_for = None
        while missing := self._head.missing():
            check()
            number = next(i for i, ranks in enumerate(machines) if missing[0] in ranks)
            name = f"node {number} of {len(machines)} with {named('rank', machines[number])}"
            if number != waiting_for:
                logger.info("Waiting for %s to join at %s", name, self.address)
                waiting_for = number
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} has not joined at {self.address} for {JOIN_SECONDS:.0f} s")
            time.sleep(0.1)

    # ---- on the head's thread

    def joined(self, members: range, host: str) -> bytes:
        return self._begin

    def received(self, members: range, body: bytes) -> None:
        try:
            report = _reports.decode(body)
        except msgspec.DecodeError as error:
            logger.warning(
                "The agent of %s sent a message of %d bytes that has no meaning: %s",
                named("rank", members),
                len(body),
                error_text(error),
            )
            return
        if isinstance(report, messages.FromRank):
            if report.rank in members:
                self._observer.replied(report.rank, report.reply)
        else:
            self._observer.failed(ValueError(report.reason) if report.by_user else RuntimeError(report.reason))

    def lost(self, members: range, reason: str) -> None:
        self._observer.failed(RuntimeError(f"{named('rank', members)}: {reason}"))
