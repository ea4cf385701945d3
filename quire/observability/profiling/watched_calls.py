"""Temporarily watches calls of an object's methods. An attribute of the object hides the method of its class, so an
unwatched call costs nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import Any

Watcher = Callable[..., Any]  # receives the method and its arguments, and calls it


class _Chain:
    """Replaces a method. The watcher that was added last is called first."""

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
    """Call a watcher instead of a method. The returned function removes the watcher; watchers may be removed in any
    order."""
    chain = vars(owner).get(name)
    if not isinstance(chain, _Chain):
        chain = _Chain(owner, name)
        setattr(owner, name, chain)
    chain.add(watcher)
    return partial(chain.remove, watcher)


Range = Callable[[str], AbstractContextManager[Any]]  # creates a named range in a trace


def core_calls(scheduler: Any) -> Iterator[tuple[Any, str, Callable[..., str]]]:
    """Yield the stages of a step in a core: (object, name of its method, function that names a call)."""
    yield scheduler, "schedule", lambda *_: "schedule"
    yield scheduler, "update", lambda *_: "output"


def name_of_step(step: Any) -> str:
    """Return the name of a step, the argument of `submit`."""
    return f"step {step.step_id}: {len(step.rows)} requests, {sum(step.num_tokens)} tokens"


def rank_calls(
    runner: Any, name_of_step: Callable[..., str] = name_of_step
) -> Iterator[tuple[Any, str, Callable[..., str]]]:
    """Yield the stages of a step in a rank. All of `submit` except the forward pass counts as preparation."""
    yield runner, "submit", name_of_step
    yield runner.staging, "stage", lambda *_: "prepare"
    yield runner.forward, "run", lambda *_: "forward"
    yield runner, "sample", lambda *_: "sample"


def mark(stages: Iterator[tuple[Any, str, Callable[..., str]]], make_range: Range) -> list[Callable[[], None]]:
    """Wrap the stages' calls in ranges. Each returned function removes one of them."""

    def watcher(name: Callable[..., str]) -> Watcher:
        def call(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with make_range(name(*arguments)):
                return method(*arguments, **options)

        return call

    return [watch(owner, method, watcher(name)) for owner, method, name in stages]
