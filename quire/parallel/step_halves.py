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
    thread, so that nested functions may call `pass_on`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "second half")  # starts a thread when it is used
        self._batons = threading.Semaphore(0), threading.Semaphore(0)
        self._is_running = [False, False]
        self._second = -1  # the identifier of its thread

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Return the results of both. If one raises an exception, it is raised here after both have ended."""
        self._is_running = [True, True]
        later = self._pool.submit(self._run_second, second, torch.get_num_threads(), _stream())
        try:
            result = first()
        finally:
            self._end(0)
            later.exception()  # waits
        return result, later.result()

    def pass_on(self) -> None:
        this = int(threading.get_ident() == self._second)
        if self._is_running[1 - this]:
            self._batons[1 - this].release()
            self._batons[this].acquire()

    def _run_second(self, work: Callable[[], T], threads: int, stream: "torch.cuda.Stream | None") -> T:
        """threads, stream: settings of the first half's thread, which are per-thread and must be set again."""
        self._second = threading.get_ident()
        self._batons[1].acquire()
        try:
            torch.set_num_threads(threads)
            with torch.inference_mode(), torch.cuda.stream(stream):
                return work()
        finally:
            self._end(1)

    def _end(self, this: int) -> None:
        self._is_running[this] = False
        if self._is_running[1 - this]:
            self._batons[1 - this].release()


def _stream() -> "torch.cuda.Stream | None":
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
