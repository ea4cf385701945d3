"""The pool of worker processes, as its users see it."""

import asyncio
import contextlib
import os
import socket
import threading
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

import msgspec

from quire.platform.untrusted.limits import MIB, BusyError, Limits
from quire.platform.untrusted.service import Job, Preparation, Service

SLOTS = 2  # jobs that run at a time
PLACES = 8  # jobs that have a process
QUEUE = 10_000  # total jobs
QUEUE_BYTES = 512 * MIB  # of the arguments of all jobs
IDLE_SECONDS = 60.0  # idle time after which the launcher ends


class UntrustedPool:
    """Runs functions on untrusted data in separate processes. All methods may be called from any thread."""

    def __init__(
        self, slots: int = SLOTS, places: int = PLACES, queue: int = QUEUE, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.slots = slots
        self.places = places
        self.idle_seconds = idle_seconds
        self._queue = queue
        self._lock = threading.Lock()
        self._new: list[Job] = []  # submitted, not yet picked up by the thread
        self._count = self._bytes = 0  # unfinished jobs, and their arguments
        self._ids = count()
        self._wake: socket.socket | None = None  # of the thread that serves the pool; None without one

    def submit(
        self, function: str, *arguments: Any, limits: Limits, preparation: Preparation | None = None
    ) -> Future[Any]:
        """Run a function, named "package.module:function", on arguments of plain data that msgpack can express.

        The future returns its result as plain data, or raises ValueError with the function's error text,
        LimitExceededError (also a ValueError), BusyError or WorkerError. Cancelling it ends the job.
        """
        data = msgspec.msgpack.encode(arguments)
        job = Job(next(self._ids), function, data, limits, preparation)
        with self._lock:
            if self._count >= self._queue:
                raise BusyError(f"{self._queue} jobs of this kind are waiting or running, which is the limit")
            if self._bytes + len(data) > QUEUE_BYTES and self._count:
                raise BusyError(f"jobs of this kind with {QUEUE_BYTES // MIB} MiB are waiting, which is the limit")
            self._count += 1
            self._bytes += len(data)
            self._new.append(job)
            if self._wake is None:
                self._start_thread()
            self._notify()
        job.future.add_done_callback(partial(self._finished, len(data)))
        return job.future

    def run(self, function: str, *arguments: Any, limits: Limits, preparation: Preparation | None = None) -> Any:
        """Like `submit`, but wait for the result."""
        return self.submit(function, *arguments, limits=limits, preparation=preparation).result()

    async def run_async(
        self, function: str, *arguments: Any, limits: Limits, preparation: Preparation | None = None
    ) -> Any:
        """Like `submit`, but await the result. The job ends if the task is cancelled."""
        job = self.submit(function, *arguments, limits=limits, preparation=preparation)
        return await asyncio.wrap_future(job)

    def _start_thread(self) -> None:
        """The caller holds the lock."""
        mine, self._wake = socket.socketpair()
        for end in (mine, self._wake):
            end.setblocking(False)
        service = Service(self, mine)
        threading.Thread(target=service.serve, name="quire-untrusted", daemon=True).start()

    def _notify(self) -> None:
        """Wake the thread. The caller holds the lock."""
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):  # a wake-up is already pending
                self._wake.send(b"w")

    def _finished(self, num_bytes: int, future: "Future[Any]") -> None:
        with self._lock:
            self._count -= 1
            self._bytes -= num_bytes
            if future.cancelled():
                self._notify()

    # ---- for the thread

    def take(self) -> list[Job]:
        with self._lock:
            new = self._new
            self._new = []
            return new

    def retire(self, force: bool = False) -> bool:
        with self._lock:
            if self._new and not force:
                return False
            if self._wake is not None:
                self._wake.close()
                self._wake = None
            return True


_shared: tuple[int, UntrustedPool] | None = None
_sharing = threading.Lock()


def shared_pool() -> UntrustedPool:
    """Return the pool of this process. It uses no resources before its first job."""
    global _shared
    with _sharing:
        if _shared is None or _shared[0] != os.getpid():  # a forked process has no thread for its parent's pool
            _shared = os.getpid(), UntrustedPool()
        return _shared[1]
