"""Gates: the interface for things that a request may have to wait for before it can be scheduled."""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.messages.engine import EngineCoreRequest, FinishReason
from quire.messages.errors import error_text
from quire.platform.untrusted.limits import BusyError
from quire.scheduler.request import Request


class Gate(Protocol):
    """Lets requests pass when something is ready for them: a compiled grammar, a loaded adapter, transferred KV blocks.

    A request that waits at a gate is outside the queue, so it delays no other. When all gates let it pass, it takes its
    old place in the order of service.
    """

    def ready(self, request: EngineCoreRequest) -> bool:
        """Whether the request may be scheduled. Must not block.

        Called when the request arrives or has been preempted, and after each wake-up, until the request has passed.
        Raises ValueError if the request can never run, and BusyError if other requests took the time or the memory that
        it needs; the request then fails with that message.
        """

    def connect(self, wake: Callable[[], None]) -> None:
        """wake: call it, from any thread, when a request that had to wait may be ready. It does not block."""


class Connector(Gate, Protocol):
    """The scheduler's half of what moves blocks between the pool and places beyond it: tiers, or other engines. It says
    what is there, what to load, what to save and what to hold. The workers' half is a Store (worker/kv_transfer.py).

    All methods but `connect` are called on the thread of the engine core, and must not block. num_queries: tokens that
    were looked up. num_hits: those that were loaded.
    """

    num_queries: int
    num_hits: int

    def scheduled(self, step_id: int, requests: Sequence[Request]) -> None:
        """A step has been scheduled, with these requests."""

    def withdrawn(self, step_id: int) -> None:
        """A step is not run."""

    def retired(self, step_id: int) -> None:
        """A step has been run. Its requests still have the blocks that it filled."""

    def finish(self, request: EngineCoreRequest) -> None:
        """A request has ended, in any state."""

    def settle(self) -> bool:
        """Take note of transfers that have ended. Returns whether requests may run that could not before."""

    def check_time(self) -> None:
        """Let requests pass that have waited for too long. Called while nothing runs, every second."""

    def finish_all(self, wait: Callable[[float], bool]) -> None:
        """Wait until nothing is on its way. wait: sleeps for some seconds at most, or until the gate is woken. Raises
        ValueError if that takes too long."""

    def close(self) -> None: ...


class WaitingRoom:
    """The requests that wait at gates. may_open: whether to ask the gates again; set from any thread."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self.may_open = False
        self.requests: dict[str, Request] = {}

    def passes(self, request: Request) -> bool:
        """Whether a request passes all gates. If not, it waits here."""
        try:
            if all(gate.ready(request.source) for gate in self._gates):
                return True
        except (ValueError, BusyError):
            self.may_open = True  # `open` asks again, and reports the error
        self.hold(request)
        return False

    def hold(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def open(self) -> tuple[list[Request], list[tuple[Request, FinishReason, str]]]:
        """The requests that pass now, which leave, and those that cannot run, with the reason."""
        self.may_open = False  # cleared before the gates are asked, since they may set it meanwhile
        passed = []
        failed = []
        for request in list(self.requests.values()):
            try:
                if all(gate.ready(request.source) for gate in self._gates):
                    del self.requests[request.request_id]
                    passed.append(request)
            except ValueError as error:
                failed.append((request, FinishReason.BAD_REQUEST, error_text(error)))
            except BusyError as error:
                failed.append((request, FinishReason.OVERLOADED, error_text(error)))
        return passed, failed
