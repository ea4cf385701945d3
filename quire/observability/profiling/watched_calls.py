"""Calls of an object that are watched for a while. An attribute of the object hides the method of its class, so a call
that nobody watches costs nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import Any

Watcher = Callable[..., Any]  # is called with the method and its arguments, and calls it


class _Chain:
    """Takes the place of a method. The last watcher to come is called first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.hidden = owner, name, vars(owner).get(name)
        self.method = getattr(owner, name)
        self.watchers = list[Watcher]()

    def add(self, watcher: Watcher) -> None:
        self.watchers.append(watcher)
        self._compose()

    def remove(self, watcher: Watcher) -> None:
        self.watchers.remove(watcher)
        self._compose()
        if self.watchers:
            return
        if self.hidden is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.hidden)

    def _compose(self) -> None:
        self._call = reduce(lambda call, watcher: partial(watcher, call), self.watchers, self.method)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)


def watch(owner: Any, name: str, watcher: Watcher) -> Callable[[], None]:
    """Have a watcher called in place of a method. The result ends that; watchers may end in any order."""
    chain = vars(owner).get(name)
    if not isinstance(chain, _Chain):
        chain = _Chain(owner, name)
        setattr(owner, name, chain)
    chain.add(watcher)
    return partial(chain.remove, watcher)


Range = Callable[[str], AbstractContextManager[Any]]  # makes a named range of a trace


def core_calls(scheduler: Any) -> Iterator[tuple[Any, str, Callable[..., str]]]:
    """The stages of a step in a core: an object, its method, and the name of a call."""
    yield scheduler, "schedule", lambda *_: "schedule"
    yield scheduler, "update", lambda *_: "output"


def name_of_step(step: Any) -> str:
    """Of the argument of `submit`."""
    return f"step {step.step_id}: {len(step.rows)} requests, {sum(step.num_tokens)} tokens"


def rank_calls(
    runner: Any, name_of_step: Callable[..., str] = name_of_step
) -> Iterator[tuple[Any, str, Callable[..., str]]]:
    """The same for a rank. What `submit` does besides preparing and the forward belongs to the preparation, too."""
    yield runner, "submit", name_of_step
    yield runner.staging, "stage", lambda *_: "prepare"
    yield runner.forward, "run", lambda *_: "forward"
    yield runner, "sample", lambda *_: "sample"


def mark(stages: Iterator[tuple[Any, str, Callable[..., str]]], make_range: Range) -> list[Callable[[], None]]:
    """Surround the stages' calls with ranges. Each function of the result ends that for one of them."""

    def watcher(name: Callable[..., str]) -> Watcher:
        def call(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with make_range(name(*arguments)):
                return method(*arguments, **options)

        return call

    return [watch(owner, method, watcher(name)) for owner, method, name in stages]
