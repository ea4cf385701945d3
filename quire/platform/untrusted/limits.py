"""The limits of a job, and the exceptions of jobs that exceed one."""

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits of a job. cpu_seconds: processor time of all its threads. memory_bytes: address space in addition to
    its modules. total_seconds: from submission to result, including the time in the queue. slice_seconds: the time of a
    usual job; a longer one is paused while others wait. result_bytes: of the encoded result.
    """

    cpu_seconds: float
    memory_bytes: int
    total_seconds: float = 10.0
    slice_seconds: float = 0.1
    result_bytes: int = 256 * MIB

    @property
    def patience(self) -> float:
        """For how many seconds a new job waits for a place before another job, which has exceeded its slice, is
        ended."""
        return max(1.0, self.total_seconds / 10)

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "memory_bytes", "total_seconds", "slice_seconds", "result_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class LimitExceededError(ValueError):
    """A job exceeded one of its limits or crashed: its client gets a 4xx. The text begins with "it"."""

    def __init__(self, limit: Literal["cpu", "memory", "crash", "result"], text: str) -> None:
        super().__init__(text)
        self.limit = limit


class BusyError(RuntimeError):
    """The queue was full, or other jobs used up a job's total time: its client gets a 503."""


class WorkerError(RuntimeError):
    """A job could not be run, or raised an exception that is not about its arguments: a fault of the server, a 500."""
