"""The interface that keeps a core in step with others. lockstep.py implements it between processes."""

from collections.abc import Callable
from typing import Protocol


class Lockstep(Protocol):
    """Keeps the cores of replicas that share experts at the same step. has_others: whether there are other cores."""

    has_others: bool = True

    @property
    def is_running(self) -> bool:
        """Whether the cores run steps. Otherwise all of them are idle."""

    def connect(self, wake: Callable[[], None]) -> None:
        """wake: is called from a thread when another core begins to work."""

    def begin(self) -> None:
        """This core has work: let all cores run."""

    def count_step(self, is_busy: bool) -> None:
        """Count a step of this core. All cores pause when none has been busy."""

    def close(self) -> None: ...


class NoLockstep:
    """Replaces Lockstep in a core whose replica shares no experts."""

    has_others = False
    is_running = False

    def connect(self, wake: Callable[[], None]) -> None: ...

    def begin(self) -> None: ...

    def count_step(self, is_busy: bool) -> None: ...

    def close(self) -> None: ...
