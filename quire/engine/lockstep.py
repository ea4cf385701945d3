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
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # they are exported

from quire.engine.core import Lockstep
from quire.messages.engine import Meeting

STEPS_TO_AGREE = 32
_COORDINATOR = "the coordinator's address"  # a key of the store
_FOREVER = timedelta(days=365)  # a lost replica ends the others before
_HELLO = b""  # other messages are numbers of waves


class Waves(Lockstep):
    """One core's part. It counts the steps that it is told of; those of all cores have equal numbers."""

    def __init__(self, meeting: Meeting, size: int) -> None:
        """size: the number of cores."""
        store = TCPStore(meeting.host, meeting.port, is_master=False)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        if meeting.replica == 0:
            router = self._context.socket(zmq.ROUTER)
            port = router.bind_to_random_port(f"tcp://{meeting.host}")
            store.set(_COORDINATOR, f"tcp://{meeting.host}:{port}")
            threading.Thread(target=_coordinate, args=(router,), name="coordinator", daemon=True).start()
        self._address = store.get(_COORDINATOR).decode()
        self._calls = self._context.socket(zmq.DEALER)
        self._calls.connect(self._address)
        self._group = ProcessGroupGloo(PrefixStore("cores", store), meeting.replica, size, _FOREVER)
        self._wave = 0  # the one that runs, or that comes next
        self._called = -1  # the last wave that some core has begun
        self._steps = 0

    def connect(self, wake: Callable[[], None]) -> None:
        news = self._context.socket(zmq.DEALER)
        news.connect(self._address)
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
        """Every 32 steps, this waits for the others."""
        self._steps += 1
        if self._steps % STEPS_TO_AGREE:
            return
        busy = torch.tensor([int(is_busy)])
        self._group.allreduce([busy]).wait()  # type: ignore[attr-defined]  # torch does not declare it
        if not int(busy):
            self._wave += 1

    def close(self) -> None:
        self._calls.close()
        self._context.term()  # ends the threads, which close their sockets

    def _listen(self, news: "zmq.Socket[bytes]", wake: Callable[[], None]) -> None:
        """Take note of the waves that other cores begin."""
        with news, contextlib.suppress(zmq.ContextTerminated):
            while True:
                self._called = max(self._called, int(news.recv()))
                wake()


def _coordinate(router: "zmq.Socket[bytes]") -> None:
    """Tell all listeners which waves begin, also those that come later."""
    listeners, last = set(), _HELLO
    with router, contextlib.suppress(zmq.ContextTerminated):
        while True:
            sender, message = router.recv_multipart()
            if message == _HELLO:
                listeners.add(sender)
                told = [sender] if last != _HELLO else []
            else:
                last, told = message, [*listeners]
            for listener in told:
                router.send_multipart([listener, last])
