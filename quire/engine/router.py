"""Decides which of several cores gets a request."""

from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT_OF_WAITING = 4  # a request that waits counts as much as four that run


@dataclass
class _Core:
    """A core's last report, and the numbers of requests that were sent to it and that it has reported as received."""

    waiting: int = 0
    running: int = 0
    sent: int = 0
    received: int = 0

    @property
    def load(self) -> int:
        return WEIGHT_OF_WAITING * (self.waiting + self.sent - self.received) + self.running


class Router:
    """Sends each request to the core with the lowest `4 * waiting + running`. Requests that are on their way to a core
    count as waiting there. Cores with equal loads take turns.
    """

    def __init__(self, num_cores: int) -> None:
        self._cores = [_Core() for _ in range(num_cores)]
        self._next = 0

    def choose(self, ready: Sequence[int]) -> int:
        """The core for a request, which will be sent to it. ready: the numbers of the cores to choose from."""
        cores, count, first = self._cores, len(self._cores), self._next
        core = min(ready, key=lambda rank: (cores[rank].load, (rank - first) % count))
        self._next = (core + 1) % count
        return core

    def sent(self, core: int) -> None:
        """A request is sent to a core, chosen here or elsewhere."""
        self._cores[core].sent += 1

    def report(self, core: int, waiting: int, running: int, received: int) -> None:
        """A core's state. received: the number of requests that it had received from here by then."""
        state = self._cores[core]
        state.waiting, state.running, state.received = waiting, running, received

    def forget(self, core: int) -> None:
        """A core was lost. Another one will take its number."""
        self._cores[core] = _Core()
