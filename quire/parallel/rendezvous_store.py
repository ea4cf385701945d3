"""The store of the cluster's head, at which ranks of several machines exchange their addresses."""

import threading
from datetime import timedelta

import msgspec
import zmq
from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported, by an assignment

from quire.cluster.messages import Add, Answer, Delete, Get, Has, Put, StoreRequest
from quire.cluster.secret import ClusterSecret

_answers = msgspec.msgpack.Decoder(Answer)


class RendezvousStore(Store):
    """A torch store over a connection that requires the cluster's secret; torch's own TCPStore has no such protection.
    torch calls it from Python and from C++ threads. Waiting for values has no time limit: a waiting rank ends when its
    executor does. Keep a reference to the store, since torch's objects on top of it do not.

    generation: of the ranks that meet; their keys are separate from those of other generations.
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
