"""Alternates between two halves of a step: while one half waits for other ranks, the other one computes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class WholeStep:
    """Turns for steps that are never divided: there is no other half."""

    def pass_on(self) -> None:
        """Let the other half compute until it also waits. Call it before waiting for other ranks."""


class Halves(WholeStep):
    """Runs two functions alternately: one at a time, until it calls `pass_on` or ends. The second one has its own
    thread, so that nested functions may call `pass_on`.

    On a GPU, the second one also has its own stream, so that its kernels do not wait for exchanges of the first one.
    Before it continues, its stream waits for what the first one has launched so far, such as the keys that it stores in
    a layer. The first one never waits for the second.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "second half")  # starts a thread when it is used
        self._batons = threading.Semaphore(0), threading.Semaphore(0)
        self._is_running = [False, False]
        self._second = -1  # the identifier of its thread
        self._streams: _Streams | None = None  # on a GPU, once halves have run

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Return the results of both. If one raises an exception, it is raised here after both have ended."""
        self._is_running = [True, True]
        if self._streams is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._streams = _Streams()
        streams = self._streams
        later = self._pool.submit(self._run_second, second, torch.get_num_threads())
        try:
            result = first()
        finally:
            self._end(0)
            later.exception()  # waits
            if streams is not None:
                streams.join()
        return result, later.result()

    def pass_on(self) -> None:
        this = int(threading.get_ident() == self._second)
        if self._is_running[1 - this]:
            self._give(1 - this)
            self._take(this)

    def _run_second(self, work: Callable[[], T], threads: int) -> T:
        """threads: a setting of the first half's thread, which is per-thread and must be set again."""
        self._second = threading.get_ident()
        stream = None if self._streams is None else self._streams.second
        with torch.inference_mode(), torch.cuda.stream(stream):
            self._take(1)
            try:
                torch.set_num_threads(threads)
                return work()
            finally:
                self._end(1)

    def _end(self, this: int) -> None:
        self._is_running[this] = False
        if self._is_running[1 - this]:
            self._give(1 - this)

    def _give(self, other: int) -> None:
        """Let the other half run."""
        if self._streams is not None and other == 1:
            self._streams.note()
        self._batons[other].release()

    def _take(self, this: int) -> None:
        """Wait until the other half lets this one run."""
        self._batons[this].acquire()
        if self._streams is not None and this == 1:
            self._streams.follow()


class _Streams:
    """The streams of the two halves: the current one at construction, and one more."""

    def __init__(self) -> None:
        self.first = torch.cuda.current_stream()
        self.second = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._noted = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def note(self) -> None:
        """Note the work of the first stream so far."""
        self._noted.record(self.first)

    def follow(self) -> None:
        """Let the second stream wait for the noted work."""
        self.second.wait_event(self._noted)

    def join(self) -> None:
        """Let the first stream wait for the second, after which its memory may be reused."""
        self.first.wait_stream(self.second)
