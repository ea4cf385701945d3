"""Runs a fuzz target's inputs in a process of its own, which a bug may end, hang or bloat."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from support.fuzz_targets import MEMORY_BYTES, Target

MOST_SECONDS = 60  # of processor time, for all inputs together


def replay(target: Target, inputs: Sequence[bytes]) -> None:
    """Raises AssertionError with the number of the input, and what the target raised."""
    receiving, sending = os.pipe()
    process = os.fork()
    if not process:
        os.close(receiving)
        with os.fdopen(sending, "w", buffering=1) as report:
            _run(target, inputs, report.write)
    os.close(sending)
    with os.fdopen(receiving) as report:
        text = report.read()
    _, status = os.waitpid(process, 0)
    number, _, fault = text.rpartition("#")[2].partition("\n")
    if status or fault:
        ended = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "exit"
        raise AssertionError(f"input {number}, {inputs[int(number)][:1000]!r}: {fault or ended}")


def _run(target: Target, inputs: Sequence[bytes], report: Callable[[str], object]) -> None:
    """In the new process. It never returns."""
    status = 1
    try:
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY_BYTES, resource.RLIM_INFINITY))
        used = int(sum(os.times()[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used + MOST_SECONDS, resource.RLIM_INFINITY))
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics of Rust's code
        for number, data in enumerate(inputs):
            report(f"#{number}\n")
            target.run(data)
        status = 0
    except BaseException:
        report(traceback.format_exc())
    finally:
        os._exit(status)
