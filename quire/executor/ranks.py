"""The interface between an executor and a subset of its ranks."""

from abc import ABC, abstractmethod
from typing import Protocol

from quire.executor.messages import Reply


class Observer(Protocol):
    """Receives the messages and failures of ranks, on any thread."""

    def replied(self, rank: int, reply: Reply) -> None: ...

    def failed(self, problem: Exception) -> None:
        """Called when a rank has failed, so all must end. problem: ValueError if an option or the model is wrong."""


class Ranks(ABC):
    """The ranks of an executor that run on one machine. numbers: their rank numbers."""

    numbers: range

    @abstractmethod
    def order(self, order: bytes, ranks: range) -> None:
        """Send an encoded order to those of the given ranks that are on this machine. Returns at once."""

    @abstractmethod
    def end(self, patience: float) -> None:
        """End the ranks. patience: seconds to wait for them to end by themselves."""
