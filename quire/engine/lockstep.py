"""Keeps the cores of replicas that share experts at the same step.

Every forward exchanges tokens between all replicas, so while one of them has work, the others run dummy steps. Every 32
steps they agree whether all are idle. Then they pause, and the next request of any core wakes all of them, through a
coordinator in core 0. The time between two pauses is a wave.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import zmq
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # they are exported

from quire.cluster.secret import Admission, ClusterSecret
from quire.engine.lockstep_base import Lockstep
from quire.messages.engine import RendezvousPlace
from quire.parallel.mesh import connect_store

STEPS_TO_AGREE = 32
_COORDINATOR = "the coordinator's address"  # a key of the store
_FOREVER = timedelta(days=365)  # if a replica is lost, the others are ended
_HELLO = b""  # all other messages are wave numbers


class Waves(Lockstep):
    """One core's part. It counts the core's steps; matching steps of all cores have equal numbers."""

    def __init__(self, place: RendezvousPlace, size: int) -> None:
        """size: the number of cores."""
        self._store = store = connect_store(place.address, place.secret, place.generation)
        self._secret, self._context = ClusterSecret(place.key), zmq.Context()
        self._admission: Admission | None = None
        if place.replica == 0:
            self._admission = Admission(self._context, self._secret)
            router = self._context.socket(zmq.ROUTER)
            store.set(_COORDINATOR, self._secret.listen(router, place.host))
            threading.Thread(target=_coordinate, args=(router,), name="coordinator", daemon=True).start()
        self._address = store.get(_COORDINATOR).decode()
        self._calls = self._socket()
        self._group = ProcessGroupGloo(PrefixStore("cores", store), place.replica, size, _FOREVER)
        self._wave = 0  # the current or the next wave
        self._called = -1  # the last wave that a core has begun
        self._steps = 0

    def connect(self, wake: Callable[[], None]) -> None:
        news = self._socket()
        news.send(_HELLO)
        threading.Thread(target=self._listen, args=(news, wake), name="waves", daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self._called >= self._wave

    def begin(self) -> None:
        if not self.is_running:
            self._called = self._wave
            self._calls.send(str(self._wave).encode())

    def count_step(self, is_busy: bool) -> None:
        """Count a step. Every 32 steps, this waits for the others."""
        self._steps += 1
        if self._steps % STEPS_TO_AGREE:
            return
        busy = torch.tensor([int(is_busy)])
        self._group.allreduce([busy]).wait()  # type: ignore[attr-defined]  # torch does not declare it
        if not int(busy):
            self._wave += 1

    def close(self) -> None:
        self._calls.close(linger=0)
        if self._admission is not None:
            self._admission.close()
        self._context.term()  # ends the threads, which close their sockets

    def _socket(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        self._secret.connect(socket, self._address)
        return socket

    def _listen(self, news: "zmq.Socket[bytes]", wake: Callable[[], None]) -> None:
        """Receive the waves that other cores begin."""
        with news, contextlib.suppress(zmq.ContextTerminated):
            news.linger = 0
            while True:
                self._called = max(self._called, int(news.recv()))
                wake()


def _coordinate(router: "zmq.Socket[bytes]") -> None:
    """Announce each new wave to all listeners, and the current one to those that connect later."""
    listeners = set()
    last = _HELLO
    with router, contextlib.suppress(zmq.ContextTerminated):
        router.linger = 0
        while True:
            sender, message = router.recv_multipart()
            if message == _HELLO:
                listeners.add(sender)
                told = [sender] if last != _HELLO else []
            else:
                last = message
                told = [*listeners]
            for listener in told:
                router.send_multipart([listener, last])
