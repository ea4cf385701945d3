"""Gates: the interface for things that a request may have to wait for before it can be scheduled."""

from collections.abc import Callable
from typing import Protocol

from quire.messages.engine import EngineCoreRequest


class Gate(Protocol):
    """Lets requests pass when something is ready for them: a compiled grammar, a loaded adapter, transferred KV blocks.

    A request that waits at a gate is outside the queue, so it delays no other. When all gates let it pass, it takes its
    old place in the order of service.
    """

    def ready(self, request: EngineCoreRequest) -> bool:
        """Whether the request may be scheduled. Must not block.

        Called when the request arrives or has been preempted, and after each wake-up, until the request has passed.
        Raises ValueError if the request can never run; the request then fails with that message.
        """

    def connect(self, wake: Callable[[], None]) -> None:
        """wake: call it, from any thread, when a request that had to wait may be ready. It does not block."""
