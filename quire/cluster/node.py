"""A node's end of a cluster connection: joins the head, and joins again after a session has ended."""

import time
from typing import Any, Protocol

import msgspec
import zmq

from quire.cluster.messages import BEAT_SECONDS, Beat, Join, Leave, Payload, Refused, ToNode, Welcome
from quire.cluster.monitor import FailedHandshakes
from quire.cluster.outbox import Outbox
from quire.cluster.secret import ClusterSecret
from quire.config.engine import ConfigError
from quire.messages.errors import error_text
from quire.observability.logging import logger

SILENCE_SECONDS = 10.0  # a session has ended if the head sends nothing for this long
_TICK_MILLISECONDS = 200
_ASK_AGAIN_SECONDS = 3.0  # the head may have ended after the request
_answers = msgspec.msgpack.Decoder(ToNode)


class Member(Protocol):
    """A node's actions at the start and end of a session. Called on the thread of `Node.run`, so a call must not take
    long."""

    def begin(self, body: bytes) -> None:
        """Handle the start of a session. body: the body of the welcome."""

    def received(self, body: bytes) -> None: ...

    def end(self) -> None:
        """Handle the end of a session: stop everything that was started in it."""


class Node:
    """Maintains a session with the head at a ZeroMQ address, even if either of them is restarted."""

    def __init__(self, secret: ClusterSecret, address: str, join: Join) -> None:
        self._secret = secret
        self._address = address
        self._join = join
        self._context = zmq.Context()
        self._outbox = Outbox(self._context)
        self._socket: zmq.Socket[bytes]
        self._is_open = True
        self._has_begun = False  # whether the session has begun

    def run(self, member: Member) -> None:
        """Join, and stay in the cluster until `stop` is called. Raises ConfigError if the head refuses."""
        try:
            while self._is_open:
                self._socket = self._context.socket(zmq.DEALER)
                failures = FailedHandshakes(self._socket, least=3)  # one may be due to a shutdown
                self._secret.connect(self._socket, self._address)
                try:
                    self._take_part(member, failures)
                finally:
                    failures.close()
                    self._socket.close(linger=1000)
        finally:
            self.stop()
            self._outbox.socket.close()
            self._context.term()

    def send(self, body: bytes) -> None:
        """Send a message to the head. May be called from any thread. Messages sent between two sessions are lost."""
        self._outbox.put(b"send", body)

    def stop(self) -> None:
        """Make `run` return. May be called from any thread and from signal handlers."""
        self._outbox.close()

    def _take_part(self, member: Member, failures: FailedHandshakes) -> None:
        """Run one session."""
        logger.info("Waiting for the head at %s", self._address)
        poller: Any = zmq.Poller()
        for readable in (self._socket, self._outbox.socket, failures.socket):
            poller.register(readable, zmq.POLLIN)
        self._has_begun = False
        heard_at = 0.0
        beat_due = 0.0
        try:
            while self._is_open:
                if time.monotonic() >= beat_due:
                    beat_due = time.monotonic() + (BEAT_SECONDS if self._has_begun else _ASK_AGAIN_SECONDS)
                    self._tell(Beat() if self._has_begun else self._join)
                ready = dict(poller.poll(_TICK_MILLISECONDS))
                if failures.socket in ready:
                    failures.report(
                        "The head at %s has refused the connection; both machines must have the same "
                        "cluster_secret_file",
                        self._address,
                    )
                if self._outbox.socket in ready:
                    self._forward(*self._outbox.get())
                now = time.monotonic()
                if self._socket in ready:
                    message = self._receive()
                    heard_at = now
                    if isinstance(message, Leave):
                        logger.warning("The session with the head at %s has ended: %s", self._address, message.reason)
                        return
                    self._handle(message, member)
                elif self._has_begun and now - heard_at > SILENCE_SECONDS:
                    logger.warning("The head at %s has been silent for %.0f s", self._address, SILENCE_SECONDS)
                    return
        finally:
            if self._has_begun:
                member.end()

    def _forward(self, name: bytes, body: bytes) -> None:
        """Send the head a message from the outbox. An empty name marks the last one."""
        self._is_open = bool(name)
        if self._has_begun:
            self._tell(Payload(body) if name else Leave("it was told to end"))

    def _handle(self, message: ToNode | None, member: Member) -> None:
        """Raises ConfigError if the head refuses."""
        if isinstance(message, Refused):
            raise ConfigError(message.reason)
        if isinstance(message, Welcome):
            self._has_begun = True
            logger.info("Joined the head at %s", self._address)
            member.begin(message.body)
        elif isinstance(message, Payload) and self._has_begun:
            member.received(message.body)

    def _tell(self, message: Join | Beat | Payload | Leave) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def _receive(self) -> ToNode | None:
        data = self._socket.recv()
        try:
            message: ToNode = _answers.decode(data)
            return message
        except msgspec.DecodeError as error:
            logger.warning(
                "The head at %s sent a message of %d bytes that has no meaning: %s",
                self._address,
                len(data),
                error_text(error),
            )
            return None
