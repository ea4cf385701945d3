"""The gate at which requests wait while an engine is paused."""

from collections.abc import Callable, Iterable

from quire.messages.engine import EngineCoreRequest


class PauseGate:
    """A Gate. While it is closed, only requests that may still finish can pass."""

    def __init__(self) -> None:
        self._passing: set[str] | None = None  # None while it is open
        self._wake: Callable[[], None] = lambda: None

    @property
    def is_closed(self) -> bool:
        return self._passing is not None

    def close(self, passing: Iterable[str] = ()) -> None:
        """passing: the ids of requests that may still pass, for instance after a preemption."""
        self._passing = set(passing)

    def lets_pass(self, request_ids: Iterable[str]) -> bool:
        """Whether any of these requests can pass."""
        return self._passing is None or not self._passing.isdisjoint(request_ids)

    def open(self) -> None:
        self._passing = None
        self._wake()

    def ready(self, request: EngineCoreRequest) -> bool:
        return self._passing is None or request.request_id in self._passing

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake
