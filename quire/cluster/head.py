"""The head of a cluster, to which nodes connect: one per machine, all on one port."""

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq

from quire.cluster.messages import (
    BEAT_SECONDS,
    Add,
    Answer,
    Beat,
    Delete,
    Get,
    Has,
    Join,
    Leave,
    Payload,
    Put,
    Refused,
    StoreRequest,
    ToHead,
    ToNode,
    Welcome,
)
from quire.cluster.monitor import FailedHandshakes
from quire.cluster.outbox import Outbox
from quire.cluster.secret import Admission, ClusterSecret
from quire.config.engine import ConfigError
from quire.messages.errors import error_text
from quire.observability.logging import logger

SILENCE_SECONDS = 5.0  # a node that sends nothing for this long is lost
_TICK_MILLISECONDS = 200
_LONG_TICK_SECONDS = 1.0
_LARGEST_GARBAGE = 60  # bytes of a message that the log shows
_requests = msgspec.msgpack.Decoder(ToHead)


class Listener(Protocol):
    """Notified about nodes, on the head's thread. members: the numbers of a node's ranks or replicas."""

    def joined(self, members: range, host: str) -> bytes:
        """Handle a node that has joined. Returns the body of the welcome."""

    def received(self, members: range, body: bytes) -> None: ...

    def lost(self, members: range, reason: str) -> None:
        """Handle a node that has left or is silent."""


@dataclass(eq=False)
class _Session:
    """identity: ZeroMQ's identity of the connection."""

    identity: bytes
    members: range
    node: int
    host: str
    heard_at: float = field(default_factory=time.monotonic)


class Head:
    """Listens on host:port for nodes with members of the given numbers. A session begins once a node has proven that it
    agrees with the head; then both send heartbeats. Raises ConfigError if it cannot listen.

    The head also contains the rendezvous store of the members, see parallel/rendezvous_store.py.

    facts: the values that a node must agree with, by name, see `executor/agreement.py`. noun: the word for members.
    """

    def __init__(
        self,
        secret: ClusterSecret,
        host: str,
        port: int,
        members: range,
        noun: str,
        facts: Mapping[str, str],
        versions: Mapping[str, str],
    ) -> None:
        self._members = members
        self._noun = noun
        self._facts = facts
        self._versions = versions
        self._context = zmq.Context()
        self._admission = Admission(self._context, secret)
        self._outbox = Outbox(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # sending to a disconnected node is an error
        self._failures = FailedHandshakes(self._socket)
        self._thread: threading.Thread | None = None
        try:
            self.address = secret.listen(self._socket, host, port)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {host}:{port}, where other machines connect: {error_text(error)}; "
                "it must be an address of this machine"
            ) from error
        self._sessions: dict[bytes, _Session] = {}
        self._store: dict[str, bytes] = {}
        self._waiting: defaultdict[str, list[bytes]] = defaultdict(list)  # by key: the identities that wait for it
        self._listener: Listener

    def start(self, listener: Listener) -> None:
        """Start accepting nodes."""
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="cluster head", daemon=True)
        self._thread.start()

    def send(self, members: range, body: bytes) -> None:
        """Send a message to the node with these members, if it is connected. May be called from any thread."""
        self._outbox.put(str(members.start).encode(), body)

    def close(self) -> None:
        """End all sessions. Later calls do nothing."""
        if not self._outbox.close():
            return
        if self._thread is None:
            self._close()
        elif self._thread is not threading.current_thread():  # otherwise the garbage collector called this
            self._thread.join()

    def missing(self) -> list[int]:
        """Return the members that no node has."""
        found = {member for session in list(self._sessions.values()) for member in session.members}
        return [member for member in self._members if member not in found]

    # ---- on the head's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._socket, self._outbox.socket, self._failures.socket):
            poller.register(readable, zmq.POLLIN)
        beat_due = 0.0
        is_open = True
        last_tick = time.monotonic()
        while is_open:
            ready: dict[Any, int] = dict(poller.poll(_TICK_MILLISECONDS))
            if self._failures.socket in ready:
                self._failures.report(
                    "A peer of the cluster's port %s was refused: it did not prove that it has the "
                    "same cluster_secret_file",
                    self.address,
                )
            while is_open and self._outbox.socket.poll(0):
                is_open = self._forward(*self._outbox.get())
            while self._socket.poll(0):
                self._receive(*self._socket.recv_multipart()[:2])
            now = time.monotonic()
            if now >= beat_due:
                beat_due = now + BEAT_SECONDS
                self._tell_all(Beat())
            self._lose_silent(now, since_last_tick=now - last_tick)
            last_tick = now
        self._tell_all(Leave("the head has ended"))
        self._close()

    def _tell_all(self, message: ToNode) -> None:
        for session in list(self._sessions.values()):
            self._tell(session.identity, message)

    def _lose_silent(self, now: float, since_last_tick: float) -> None:
        """Drop the nodes that have been silent for too long. If this process itself was stopped, that time does not
        count."""
        for session in list(self._sessions.values()):
            if since_last_tick > _LONG_TICK_SECONDS:
                session.heard_at += since_last_tick
            elif now - session.heard_at > SILENCE_SECONDS:
                self._lose(session, f"it has been silent for {SILENCE_SECONDS:.0f} s")

    def _close(self) -> None:
        self._failures.close()
        self._socket.close(linger=1000)
        self._outbox.socket.close()
        self._admission.close()
        self._context.term()

    def _forward(self, name: bytes, body: bytes) -> bool:
        """Send a message from the outbox. Returns False if it was the last."""
        if name:
            for session in self._sessions.values():
                if session.members.start == int(name):
                    self._tell(session.identity, Payload(body))
                    break
        return bool(name)

    def _receive(self, identity: bytes, data: bytes = b"") -> None:
        try:
            message = _requests.decode(data)
        except msgspec.DecodeError as error:
            logger.warning(
                "The cluster's port %s got a message of %d bytes that has no meaning (%s): %r",
                self.address,
                len(data),
                error_text(error),
                data[:_LARGEST_GARBAGE],
            )
            return
        session = self._sessions.get(identity)
        if isinstance(message, Join):
            self._join(identity, message)
        elif isinstance(message, StoreRequest):
            self._look_up(identity, message)
        elif session is None:
            if not isinstance(message, Leave):
                self._tell(identity, Leave("the head does not know this session"))
        elif isinstance(message, Leave):
            self._lose(session, message.reason)
        else:
            session.heard_at = time.monotonic()
            if isinstance(message, Payload):
                self._listener.received(session.members, message.body)

    def _join(self, identity: bytes, join: Join) -> None:
        if identity in self._sessions:
            return  # a duplicate request
        members = range(join.first, join.first + join.count)
        name = f"the node at {join.host} with {named(self._noun, members)}"
        for session in list(self._sessions.values()):
            again = session.node == join.node
            if (again or set(session.members) & set(members)) and (again or not self._tell(session.identity, Beat())):
                self._lose(session, "it has started again")
        problem = self._problem(join, members)
        if problem is not None:
            logger.error("Refused %s: %s", name, problem)
            self._tell(identity, Refused(f"the head at {self.address} refuses {name}: {problem}"))
            return
        for what in sorted(self._versions.keys() | join.versions.keys()):
            ours = self._versions.get(what)
            theirs = join.versions.get(what)
            if ours != theirs:
                logger.warning("%s has version %s at the head, and %s at %s", what, ours, theirs, name)
        self._sessions[identity] = session = _Session(identity, members, join.node, join.host)
        logger.info("%s has joined", name[0].upper() + name[1:])
        self._tell(identity, Welcome(self._listener.joined(session.members, session.host)))

    def _problem(self, join: Join, members: range) -> str | None:
        """Return why a node cannot join, or None if it can."""
        for name in sorted(self._facts.keys() | join.facts.keys()):
            ours = self._facts.get(name)
            theirs = join.facts.get(name)
            if ours != theirs:
                return f"{name} differs: it is {ours} at the head, and {theirs} at the node"
        for session in self._sessions.values():
            if both := set(session.members) & set(members):
                return f"{self._noun} {min(both)} has joined already, from {session.host}"
        if not members or not set(members) <= set(self._members):
            return f"the head expects {named(self._noun, self._members)} from other machines"
        return None

    def _lose(self, session: _Session, reason: str) -> None:
        del self._sessions[session.identity]
        self._tell(session.identity, Leave(f"the head has given the session up: {reason}"))
        self._listener.lost(session.members, f"the node at {session.host} was lost: {reason}")

    def _tell(self, identity: bytes, message: ToNode) -> bool:
        """Send a message. Returns False if the connection is closed."""
        try:
            self._socket.send_multipart([identity, msgspec.msgpack.encode(message)])
        except zmq.ZMQError:
            return False
        return True

    # ---- the store

    def _look_up(self, identity: bytes, request: StoreRequest) -> None:
        store = self._store
        value = b""
        if isinstance(request, Get):
            if request.key not in store:
                self._waiting[request.key].append(identity)
                return
            value = store[request.key]
        elif isinstance(request, Put):
            store[request.key] = request.value
        elif isinstance(request, Add):
            value = store[request.key] = b"%d" % (int(store.get(request.key, b"0")) + request.number)
        elif isinstance(request, Has):
            value = b"1" if all(key in store for key in request.keys) else b""
        elif isinstance(request, Delete):
            value = b"" if store.pop(request.key, None) is None else b"1"
        self._tell(identity, Answer(value))
        if isinstance(request, Put | Add):
            for waiting in self._waiting.pop(request.key, ()):
                self._tell(waiting, Answer(store[request.key]))


def named(noun: str, members: range) -> str:
    """Return a range of members as text: rank 2, or ranks 2 to 5."""
    return f"{noun} {members.start}" if len(members) == 1 else f"{noun}s {members.start} to {members.stop - 1}"
