"""The store at which ranks of several machines exchange their addresses: that of the cluster's head."""

import threading
from datetime import timedelta

import msgspec
import zmq
from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported, by an assignment

from quire.cluster.messages import Add, Answer, Delete, Get, Has, Put, StoreRequest
from quire.cluster.secret import ClusterSecret

_answers = msgspec.msgpack.Decoder(Answer)


class RendezvousStore(Store):
    """A store of torch's over a connection that only those who know the cluster's secret can make, which torch's own
    TCPStore lacks. torch calls it from Python and from threads in C++. Values are awaited without a limit: a rank that
    waits ends when its executor does. Keep a reference to it: torch's objects over it do not.

    generation: of the ranks that meet, whose keys nobody else sees.
    """

    def __init__(self, secret: ClusterSecret, address: str, generation: int = 0) -> None:
        super().__init__()
        self._prefix = f"{generation}/"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        secret.connect(self._socket, address)
        self._lock = threading.Lock()

    @classmethod
    def at(cls, address: str, secret: bytes, generation: int) -> "RendezvousStore":
        return cls(ClusterSecret(secret), address, generation)

    def _ask(self, request: StoreRequest) -> bytes:
        with self._lock:
            self._socket.send(msgspec.msgpack.encode(request))
            return _answers.decode(self._socket.recv()).value

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(Get(self._prefix + key))

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Add(self._prefix + key, value)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(Has([self._prefix + key for key in keys])))

    def wait(self, keys: list[str], timeout: timedelta = timedelta()) -> None:
        for key in keys:
            self._ask(Get(self._prefix + key))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(self._prefix + key)))

    def clone(self) -> "RendezvousStore":
        return self  # it has a lock
