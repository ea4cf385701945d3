"""The connections between cores: one thread with ZeroMQ sockets that accept only peers with the cluster's secret.

A consumer reads blocks over other connections, without involving the producer's core. During a read the producer may
restart, or reuse the blocks because the consumer was silent for HOLD_SECONDS. So the consumer uses the blocks only
after the producer confirms that it still holds them: its reply to a beat that was sent after the end of the read must
list the fetch. No clocks are compared.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import zmq

from quire.cluster.monitor import FailedHandshakes
from quire.cluster.outbox import Outbox
from quire.cluster.secret import Admission, ClusterSecret
from quire.config.engine import ConfigError
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.transfer.core_messages import Beat, BeatBack, Drop, Elsewhere, Fetch, Gone, Offer, ToConsumer, ToProducer

BEAT_SECONDS = 1.0
LOST_SECONDS = 5.0  # a producer that has not answered a beat for this long is lost
HOLD_SECONDS = 20.0  # after this time, the blocks held for a silent consumer are released
_TICK_MILLISECONDS = 200
_REMEDY = "both engines must have the same cluster_secret_file, or both insecure_transfers"
_from_consumer = msgspec.msgpack.Decoder(ToProducer)
_from_producer = msgspec.msgpack.Decoder(ToConsumer)


@dataclass
class Asked:
    """A consumer has sent a message."""

    asker: bytes
    message: Fetch | Drop


@dataclass
class AskerLost:
    """A consumer has been silent for HOLD_SECONDS."""

    asker: bytes


@dataclass
class Told:
    """A producer has sent a message."""

    address: str
    message: Offer | Gone | Elsewhere


@dataclass
class Confirmed:
    """A producer still held the blocks of these fetches at `sent_at`, when the answered beat was sent."""

    address: str
    sent_at: float
    numbers: list[int]


@dataclass
class FetchLost:
    """The producer no longer holds the blocks offered for a fetch, or a message about the fetch was lost."""

    address: str
    number: int


@dataclass
class ProducerLost:
    """A producer cannot be reached, or has not answered for LOST_SECONDS."""

    address: str


Event = Told | Confirmed | FetchLost | ProducerLost


class _Line:
    """A consumer's connection to a producer. open: the number of messages received for each fetch that has not been
    dropped."""

    def __init__(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        self.socket, self.failures = socket, FailedHandshakes(socket)
        self.alive_at = now
        self.beat_due = now
        self.open = dict[int, int]()
        self.unused_since = now
        self.beats: dict[float, list[int]] = {}  # unanswered beats, by time, with their fetches


class Link:
    """A core's connections to other cores. events: from producers, oldest first; the reader removes them. wake: called
    from the link's thread after each new event. has_failed: the link has stopped working."""

    def __init__(self, secret: ClusterSecret, listen: tuple[str, int] | None) -> None:
        """listen: the address that a producer listens at. Raises ConfigError if it cannot be used."""
        self._hear: Callable[[Asked | AskerLost], None]
        self.events: deque[Event] = deque()
        self.wake: Callable[[], None] = lambda: None
        self.has_failed = False
        self._secret, self._context = secret, zmq.Context()
        self._outbox = Outbox(self._context)
        self._server: zmq.Socket[bytes] | None = None
        self._admission: Admission | None = None
        self._lines: dict[str, _Line] = {}
        self._askers: dict[bytes, float] = {}  # by consumer: when its last message arrived
        self._num_sent: dict[bytes, dict[int, int]] = {}  # by consumer and fetch: messages sent
        if listen is not None:
            self._admission = Admission(self._context, secret)
            self._server = self._context.socket(zmq.ROUTER)
            self._server.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a consumer that reconnects keeps its identity
            self._failures = FailedHandshakes(self._server)
            try:
                secret.listen(self._server, *listen)
            except (zmq.ZMQError, OSError) as error:
                self._free()
                raise ConfigError(
                    f"kv_transfer_config: {listen[0]}:{listen[1]} cannot be used: {error_text(error)}; "
                    "choose another kv_ip or kv_port"
                ) from error
        self._thread = threading.Thread(target=self._run, name="quire-kv-link", daemon=True)

    def start(self, hear: Callable[[Asked | AskerLost], None] = lambda event: None) -> None:
        """hear: called from the link's thread with each message of a consumer, and when one is lost."""
        self._hear = hear
        self._thread.start()

    # ---- called by the core

    def tell_producer(self, address: str, message: Fetch | Drop) -> None:
        """Send a message to a producer. address: IP address and port, see `tcp_address`."""
        self._outbox.put(b"p" + address.encode(), msgspec.msgpack.encode(message))

    def ask_to_confirm(self, address: str) -> None:
        """Send a beat soon. A Confirmed event follows, or an event for lost fetches or a lost producer."""
        self._outbox.put(b"b" + address.encode(), b"")

    def tell_consumer(self, asker: bytes, message: Offer | Gone | Elsewhere) -> None:
        self._outbox.put(b"c" + asker, msgspec.msgpack.encode(message))

    def close(self) -> None:
        if self._outbox.close():
            self._thread.join(5)

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception:
            logger.exception("The connections to other engines have failed; prompts are computed here from now on")
            self.has_failed = True
            for address in self._lines:
                self._tell_core(ProducerLost(address))
            for asker in self._askers:
                self._hear(AskerLost(asker))
        finally:
            self._free()

    def _step(self) -> bool:
        """Wait briefly for messages and handle them. Returns False once the link is closed."""
        ready = self._wait()
        while self._outbox.socket.poll(0):
            name, body = self._outbox.get()
            if not name:
                return False
            self._pass_on(name, body)
        if self._server is not None and self._server in ready:
            self._hear_consumers(self._server)
        if self._server is not None and self._failures.socket in ready:
            self._failures.report(f"A consumer of KV blocks was refused; {_REMEDY}")
        for address, line in list(self._lines.items()):
            if line.socket in ready:
                self._hear_producer(address, line)
        self._look_at_time()
        return True

    def _wait(self) -> dict[Any, int]:
        """Return the readable sockets, after _TICK_MILLISECONDS at most."""
        poller: Any = zmq.Poller()
        poller.register(self._outbox.socket, zmq.POLLIN)
        if self._server is not None:
            poller.register(self._server, zmq.POLLIN)
            poller.register(self._failures.socket, zmq.POLLIN)
        for line in self._lines.values():
            poller.register(line.socket, zmq.POLLIN)
        return dict(poller.poll(_TICK_MILLISECONDS))

    def _pass_on(self, name: bytes, body: bytes) -> None:
        """Handle a message from the outbox: for a producer ("p"), a request for a beat ("b"), or for a consumer."""
        if name[:1] == b"p":
            self._send(name[1:].decode(), body)
        elif name[:1] == b"b":
            if (doubtful := self._lines.get(name[1:].decode())) is not None:
                doubtful.beat_due = 0.0
        elif self._server is not None:
            self._answer(self._server, name[1:], body)

    def _send(self, address: str, body: bytes) -> None:
        now = time.monotonic()
        message = _from_consumer.decode(body)
        line = self._lines.get(address)
        if line is None:
            if isinstance(message, Drop):
                return  # the connection has been lost
            try:
                line = self._lines[address] = self._line(address, now)
            except zmq.ZMQError as error:  # such as too many open files
                logger.warning(
                    "There is no connection to %s; its prompts are computed here: %s", address, error_text(error)
                )
                self._tell_core(ProducerLost(address))
                return
        if isinstance(message, Fetch):
            if not line.open:
                line.alive_at = line.beat_due = now
            line.open[message.number] = 0
        elif isinstance(message, Drop):
            line.open.pop(message.number, None)
            line.unused_since = now
        line.socket.send(body)

    def _line(self, address: str, now: float) -> _Line:
        """Open a connection. Raises ZMQError."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IDENTITY, uuid4().bytes)  # kept when ZeroMQ reconnects
            self._secret.connect(socket, address)
            return _Line(socket, now)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise

    def _answer(self, server: "zmq.Socket[bytes]", asker: bytes, body: bytes) -> None:
        message = _from_producer.decode(body)
        assert not isinstance(message, BeatBack)  # the core sends none
        counts = self._num_sent.get(asker, {})
        if message.number in counts:
            counts[message.number] += 1
            server.send_multipart([asker, body])  # it is lost if the consumer has left

    def _hear_consumers(self, server: "zmq.Socket[bytes]") -> None:
        while server.poll(0):
            asker, *parts = server.recv_multipart()
            try:
                message: ToProducer = _from_consumer.decode(b"".join(parts))
            except msgspec.DecodeError as error:
                logger.warning("A consumer of KV blocks sent a message without meaning: %s", error_text(error))
                continue
            self._askers[asker] = time.monotonic()
            counts = self._num_sent.setdefault(asker, {})
            if isinstance(message, Beat):
                answer = BeatBack(message.sent_at, [counts.get(number, -1) for number in message.open])
                server.send_multipart([asker, msgspec.msgpack.encode(answer)])
                continue
            if isinstance(message, Fetch):
                counts[message.number] = 0
            else:
                counts.pop(message.number, None)
            self._hear(Asked(asker, message))

    def _hear_producer(self, address: str, line: _Line) -> None:
        while line.socket.poll(0):
            data = line.socket.recv()
            try:
                message: ToConsumer = _from_producer.decode(data)
            except msgspec.DecodeError as error:
                logger.warning("%s sent a message without meaning: %s", address, error_text(error))
                continue
            if isinstance(message, BeatBack):
                self._compare(address, line, message)
            elif message.number in line.open:
                line.open[message.number] += 1
                self._tell_core(Told(address, message))

    def _compare(self, address: str, line: _Line, answer: BeatBack) -> None:
        """Detect lost messages: ZeroMQ reconnects by itself, even to a new process."""
        line.alive_at = max(line.alive_at, answer.sent_at)
        numbers = line.beats.pop(answer.sent_at, [])
        known = []
        for number, num_sent in zip(numbers, answer.num_sent, strict=False):
            if num_sent == line.open.get(number):
                known.append(number)
            elif number in line.open:
                self._tell_core(FetchLost(address, number))
        self._tell_core(Confirmed(address, answer.sent_at, known))

    def _look_at_time(self) -> None:
        now = time.monotonic()
        for address, line in list(self._lines.items()):
            if line.open and now >= line.beat_due:
                line.beat_due = now + BEAT_SECONDS
                line.beats[now] = list(line.open)
                line.socket.send(msgspec.msgpack.encode(Beat(now, list(line.open))))
            if line.failures.socket.poll(0):
                line.failures.report(f"%s has refused the connection; {_REMEDY}", address)
                self._lose(address)
            elif line.open and now - line.alive_at > LOST_SECONDS:
                logger.warning(
                    "The producer of KV blocks at %s does not answer; its prompts are computed here", address
                )
                self._lose(address)
            elif not line.open and now - line.unused_since > HOLD_SECONDS:
                self._close(self._lines.pop(address))
        for asker, heard_at in list(self._askers.items()):
            if now - heard_at > HOLD_SECONDS:
                del self._askers[asker], self._num_sent[asker]
                self._hear(AskerLost(asker))

    def _lose(self, address: str) -> None:
        self._close(self._lines.pop(address))
        self._tell_core(ProducerLost(address))

    def _tell_core(self, event: Event) -> None:
        self.events.append(event)
        self.wake()

    @staticmethod
    def _close(line: _Line) -> None:
        line.failures.close()
        line.socket.close(linger=0)

    def _free(self) -> None:
        for line in self._lines.values():
            self._close(line)
        if self._server is not None:
            self._failures.close()
            self._server.close(linger=0)
        if self._admission is not None:
            self._admission.close()
        self._outbox.close()
        self._outbox.socket.close()
        self._context.term()
