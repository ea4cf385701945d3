"""The interface of an executor to some of its ranks."""

from abc import ABC, abstractmethod
from typing import Protocol

from quire.executor.messages import Reply


class Observer(Protocol):
    """Is told what ranks say and what becomes of them, on any thread."""

    def replied(self, rank: int, reply: Reply) -> None: ...

    def failed(self, problem: Exception) -> None:
        """A rank has failed, so all have to end. problem: ValueError if an option or the model is wrong."""


class Ranks(ABC):
    """Those ranks of an executor that run on one machine. numbers: which ones."""

    numbers: range

    @abstractmethod
    def order(self, order: bytes, ranks: range) -> None:
        """Send an encoded order to those of the given ranks that are here. Returns at once."""

    @abstractmethod
    def end(self, patience: float) -> None:
        """End the ranks. patience: seconds in which they may end by themselves."""
