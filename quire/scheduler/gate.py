"""Gates: the interface for resources that a request may have to wait for before it can be scheduled."""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.messages.engine import EngineCoreRequest, FinishReason
from quire.messages.errors import error_text
from quire.platform.untrusted.limits import BusyError
from quire.scheduler.request import Request


class Gate(Protocol):
    """Lets a request pass when a resource is ready: a compiled grammar, a loaded adapter, transferred KV blocks.

    A request that waits at a gate is outside the queue, so it delays no other. When all gates let it pass, it returns
    to its original place in the order of service.
    """

    def ready(self, request: EngineCoreRequest) -> bool:
        """Whether the request may be scheduled. Must not block.

        Called when the request arrives or has been preempted, and after each wake-up, until the request has passed.
        Raises ValueError if the request can never run, and BusyError if other requests used up the time or memory that
        it needs; the request then fails with that message.
        """

    def connect(self, wake: Callable[[], None]) -> None:
        """wake: to be called, from any thread, when a waiting request may be ready. It does not block."""


class Connector(Gate, Protocol):
    """The scheduler's half of block transfers between the pool and tiers or other engines. It tracks which blocks exist
    there, and decides which to load, save and hold. The workers' half is a Store (worker/kv_transfer.py).

    All methods except `connect` are called on the engine core's thread, and must not block. num_queries: tokens that
    were looked up. num_hits: those that were loaded.
    """

    num_queries: int
    num_hits: int

    def scheduled(self, step_id: int, requests: Sequence[Request]) -> None:
        """Called when a step has been scheduled with these requests."""

    def withdrawn(self, step_id: int) -> None:
        """Called when a step will not run."""

    def retired(self, step_id: int) -> None:
        """Called when a step has run. Its requests still have the blocks that it filled."""

    def finish(self, request: EngineCoreRequest) -> None:
        """Called when a request has ended, in any state."""

    def settle(self) -> bool:
        """Process ended transfers. Returns whether further requests may now run."""

    def check_time(self) -> None:
        """Let requests pass that have waited too long. Called every second while nothing runs."""

    def finish_all(self, wait: Callable[[float], bool]) -> None:
        """Wait until all transfers have ended. wait: sleeps until the gate is woken, or for at most the given seconds.
        Raises ValueError if that takes too long."""

    def close(self) -> None: ...


class WaitingRoom:
    """The requests that wait at gates. may_open: whether to check the gates again; set from any thread."""

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
            self.may_open = True  # `open` checks again, and reports the error
        self.hold(request)
        return False

    def hold(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def open(self) -> tuple[list[Request], list[tuple[Request, FinishReason, str]]]:
        """Remove and return the requests that pass now, and those that cannot run, with the reason."""
        self.may_open = False  # cleared before the checks, during which gates may set it
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
