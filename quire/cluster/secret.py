"""The secret that the machines of a cluster share, and the sockets between them: ZeroMQ with CURVE, which encrypts
everything and rejects peers without the secret.

Both ends derive the same two pairs of Curve25519 keys from the secret: one for servers and one for clients. A client
must know the server's public key and prove that it has the client's private key.
"""

import errno
import hmac
import os
import secrets
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.utils import z85

from quire.config.engine import ConfigError, EngineConfig
from quire.config.kv_transfer import is_private
from quire.messages.errors import error_text

LEAST_BYTES = 32
MOST_MESSAGE_BYTES = 256 << 20  # a peer that sends a longer message loses its connection
_ADDRESS_OF_GATE = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27, as are the codes of the answers
ADMITTED = 200
REFUSED = 400
FULL = 500
_MILLISECONDS = {
    zmq.HEARTBEAT_IVL: 1000,  # libzmq's own heartbeats detect lost connections and processes
    zmq.HEARTBEAT_TIMEOUT: 5000,
    zmq.HANDSHAKE_IVL: 5000,
    zmq.CONNECT_TIMEOUT: 2000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.LINGER: 1000,
}


class ClusterSecret:
    """Secures sockets so that only peers with the secret can use them."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._server, self._client = _keys(secret, b"quire server"), _keys(secret, b"quire client")

    @classmethod
    def read(cls, path: str) -> Self:
        """Read the secret from a file. Raises ConfigError if it is missing, too short, or readable by other users.
        Group read access to another user's file is allowed, since Kubernetes provides secrets to unprivileged users
        this way."""
        try:
            with Path(path).open("rb") as file:
                found = os.fstat(file.fileno())
                secret = file.read().strip()
        except OSError as error:
            raise ConfigError(f"cluster_secret_file={path!r} cannot be read: {error_text(error)}") from error
        forbidden = 0o077 if found.st_uid == os.geteuid() else 0o037
        if stat.S_IMODE(found.st_mode) & forbidden:
            raise ConfigError(
                f"cluster_secret_file={path!r} can be used by other users of this machine; run chmod 600 {path}"
            )
        if len(secret) < LEAST_BYTES:
            raise ConfigError(
                f"cluster_secret_file={path!r} must have at least {LEAST_BYTES} bytes, got "
                f"{len(secret)}; make it with: (umask 077; openssl rand -hex 32 > {path})"
            )
        return cls(secret)

    @classmethod
    def random(cls) -> Self:
        return cls(secrets.token_bytes(LEAST_BYTES))

    def listen(self, socket: "zmq.Socket[Any]", host: str, port: int = 0, most_bytes: int | None = None) -> str:
        """Bind a socket to an address of this machine. Returns its address, such as tcp://10.0.0.1:29501.

        The socket's context must have an open `Admission` or `Gate`. port: 0 for any free port. most_bytes: the longest
        allowed frame; a peer that sends a longer one loses its connection. Raises OSError.
        """
        _set_options(socket, ":" in host, most_bytes)
        socket.curve_publickey, socket.curve_secretkey = self._server
        socket.curve_server = True
        socket.zap_domain = b"quire"
        socket.bind(tcp_address(host, port or "*"))
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, socket: "zmq.Socket[Any]", address: str, most_bytes: int | None = None) -> None:
        """Connect a socket to an address in the format that `listen` returns."""
        _set_options(socket, "[" in address, most_bytes)
        socket.curve_publickey, socket.curve_secretkey = self._client
        socket.curve_serverkey = self._server[0]
        socket.connect(address)

    def admits(self, public_key: bytes, address: str) -> bool:
        """Whether a client with this verified public key (32 bytes) knows the secret. address: the client's."""
        return hmac.compare_digest(z85.encode(public_key), self._client[0])


class NoSecret(ClusterSecret):
    """Replaces the secret of engines that trust everyone in a private network (--insecure-transfers).

    The keys of both ends are known to everyone, but each connection also has keys of its own, made in its handshake. So
    nobody can read it by listening. Peers do not prove who they are: everyone with an address in a private network is
    admitted, and such a peer can place itself between two others. A peer with a secret is refused, and refuses.
    """

    def __init__(self) -> None:
        super().__init__(b"quire without a secret".ljust(LEAST_BYTES))

    def connect(self, socket: "zmq.Socket[Any]", address: str, most_bytes: int | None = None) -> None:
        """See ClusterSecret.connect. Raises ZMQError for an address outside of private networks."""
        host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not is_private(host):
            raise zmq.ZMQError(errno.EACCES, f"{host} is not in a private network, which insecure_transfers requires")
        super().connect(socket, address, most_bytes)

    def admits(self, public_key: bytes, address: str) -> bool:
        return is_private(address) and super().admits(public_key, address)


def transfer_secret(config: EngineConfig) -> ClusterSecret:
    """Return the secret of engines that exchange KV blocks. Raises ConfigError."""
    path = config.cluster.cluster_secret_file
    if path is not None:
        return ClusterSecret.read(path)
    assert config.cache.insecure_transfers  # the options were checked
    return NoSecret()


class Gate:
    """Decides which clients may connect to the secured sockets of a context. Create it before those sockets are bound.
    `socket` becomes readable when libzmq asks about a client; the owner must then call `answer` soon."""

    def __init__(self, context: "zmq.Context[Any]", secret: ClusterSecret) -> None:
        self._secret = secret
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS_OF_GATE)

    def answer(self, question: Sequence[bytes], has_room: bool = True) -> bool:
        """Admit the client if it knows the secret and there is room. Returns False if it knows the secret but there is
        no room."""
        # version, request id, domain, address, identity, mechanism, credentials
        knows = (
            len(question) == 7 and question[5] == b"CURVE" and self._secret.admits(question[6], question[3].decode())
        )
        status = REFUSED if not knows else ADMITTED if has_room else FULL
        self.socket.send_multipart([*question[:2], b"%d" % status, b"", b"", b""])
        return status != FULL


class Admission:
    """A `Gate` with its own thread, which admits all clients that know the secret until it is closed."""

    def __init__(self, context: "zmq.Context[Any]", secret: ClusterSecret) -> None:
        self._context = context
        gate = Gate(context, secret)
        self._thread = threading.Thread(target=self._admit, args=(gate,), name="admission", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._context.socket(zmq.REQ) as closer:
            closer.connect(_ADDRESS_OF_GATE)
            closer.send(b"close")
            self._thread.join()
            closer.linger = 0

    def _admit(self, gate: Gate) -> None:
        with gate.socket:
            while (question := gate.socket.recv_multipart()) != [b"close"]:
                gate.answer(question)


def tcp_address(host: str, port: int | str) -> str:
    """Return the ZeroMQ address for an IP address and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _keys(secret: bytes, label: bytes) -> tuple[bytes, bytes]:
    """Return a public and a private key in ZeroMQ's encoding (Z85)."""
    private = z85.encode(hmac.digest(secret, label, "sha256"))
    return zmq.curve_public(private), private


def _set_options(socket: "zmq.Socket[Any]", ipv6: bool, most_bytes: int | None) -> None:
    socket.set_hwm(0)
    socket.setsockopt(zmq.IPV6, ipv6)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES if most_bytes is None else most_bytes)
    for name, value in _MILLISECONDS.items():
        socket.setsockopt(name, value)
