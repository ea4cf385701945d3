"""A plugin with which ranks and cores take long to write a trace, while none of their threads can run.

So they do with a trace of thousands of steps, which would take minutes to record.
"""

from __future__ import annotations

import ctypes
from multiprocessing import current_process

from quire.messages.step import NewRequest
from quire.observability.profiling.trace import TorchTrace
from quire.sampling.logits_processors import LogitsProcessor

SECONDS = 12  # longer than any silence after which a process counts as dead


class LongTraces(LogitsProcessor):
    """Does nothing to logits."""

    def add(self, row: int, request: NewRequest) -> bool:
        return False


def _stop(trace: TorchTrace, write: bool) -> None:
    if write:
        ctypes.PyDLL(None).sleep(SECONDS)  # unlike a CDLL, it keeps Python's global lock
    _stop_soon(trace, write)


_stop_soon = TorchTrace.stop
if current_process().name.startswith(("rank ", "core ")):  # and not in the process of the test
    TorchTrace.stop = _stop  # type: ignore[method-assign]
