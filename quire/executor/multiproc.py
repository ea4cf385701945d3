"""The executor of several ranks. Each rank is a process that has a part of the model and executes every step: some of
the layers (pipeline parallelism), a share of each layer (tensor parallelism), or some tokens of each step (context
parallelism)."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from quire.cluster.addresses import interface_variables
from quire.config.engine import EngineConfig
from quire.executor import messages
from quire.executor.base import Executor
from quire.executor.local_ranks import END_SECONDS, HOST, LocalRanks
from quire.executor.ranks import Ranks
from quire.messages.changes import Change, TrainerOrder
from quire.messages.engine import RendezvousPlace
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.messages.transfers import Transfer
from quire.observability.logging import log_options
from quire.parallel.mesh import open_meeting
from quire.parallel.sizes import MeshSizes
from quire.platform.untrusted.limits import BusyError


class MultiprocExecutor(Executor):
    """Starts a process for each rank, and sends every step to all of them. The ranks of the last stage sample. The
    sampled tokens are sent to the other stages before the result is known here, and so before any later step that needs
    them.

    If a rank fails, ends or falls silent, the executor is broken: all pending and later results raise a RuntimeError
    that names the rank.
    """

    def __init__(
        self, config: EngineConfig, directory: Path, max_model_len: int, place: RendezvousPlace | None = None
    ) -> None:
        """place: the rendezvous of replicas that share experts, None for a replica that shares none. Raises ValueError
        if the options do not fit the model, RuntimeError if a rank fails for another reason."""
        sizes = MeshSizes.of(config.parallel)
        self._place = place
        self._ranks = _Ranks(sizes)
        self._end = weakref.finalize(self, self._ranks.end)  # also runs when the executor is garbage-collected
        try:
            keep = self._start(config, directory, max_model_len, sizes)
            *_, last = [ready.result() for ready in self._ranks.ready]
            self.kv_cache = last.kv_cache
            self.step_costs = last.step_costs
            del keep
        except BaseException:
            self.shutdown()
            raise

    def _start(self, config: EngineConfig, directory: Path, max_model_len: int, sizes: MeshSizes) -> Any:
        """Start the ranks. Returns an object that must exist until they are ready."""
        everyone = self._ranks.all
        place = self._place
        store = None
        if place is None:
            store = open_meeting(HOST)
            place = RendezvousPlace(0, f"{HOST}:{store.port}", HOST)
        here = LocalRanks(everyone, self._ranks)
        self._ranks.groups.append(here)
        start = messages.Start(
            config,
            str(directory),
            max_model_len,
            sizes,
            place.address,
            max(1, torch.get_num_threads() // len(everyone)),
            log_options(),
            (0, len(everyone)),
            [0] * len(everyone),
            place.replica,
            place.generation,
        )
        here.start(start, place.secret, interface_variables(place.host))
        return store

    def submit(self, step: SchedulerOutput) -> None:
        self._ranks.order(messages.Submit(step))

    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Future[ModelRunnerOutput]:
        result = self._ranks.expect(step_id)
        self._ranks.order(messages.Sample(step_id, masks), self._ranks.last_stage)
        return result

    def load_adapter(self, key: str, path: str) -> Future[None]:
        return self._ranks.load(messages.LoadAdapter(key, path))

    def drop_adapter(self, key: str) -> None:
        self._ranks.order(messages.DropAdapter(key))

    def change(self, change: Change) -> None:
        self._ranks.change(change).result()

    def exchange(self, order: TrainerOrder) -> Future[None]:
        return self._ranks.load(order)

    def transfer(self, order: Transfer) -> Future[list[int]]:
        return self._ranks.transfer(order)

    def processes(self) -> dict[int, int]:
        local = (group for group in self._ranks.groups if isinstance(group, LocalRanks))
        return {
            rank: process.pid for group in local for rank, process in zip(group.numbers, group.processes, strict=True)
        }

    def check(self) -> None:
        self._ranks.check()

    def shutdown(self) -> None:
        self._end()


class _Ranks:
    """All ranks on all machines, with their pending orders and replies. Observes the ranks.

    groups: the ranks by machine.
    """

    def __init__(self, sizes: MeshSizes) -> None:
        self.all = range(sizes.replica)
        others = len(self.all) // sizes.pp * (sizes.pp - 1)
        self.last_stage = self.all[others:]
        self._other_stages = self.all[:others]
        self.ready: list[Future[messages.Ready]] = [Future() for _ in self.all]
        self.groups: list[Ranks] = []
        self._closing: list[Callable[[], None]] = []
        self._results: dict[int, Future[ModelRunnerOutput]] = {}  # by step
        # Adapter loads and exchanges with trainers, by key, with the ranks' replies.
        self._loading: dict[str, tuple[Future[None], list[messages.Loaded]]] = {}
        self._changing: tuple[Future[None], list[messages.Changed]] = Future(), []  # the last change, with the replies
        self._changing[0].set_result(None)
        self._moving: dict[int, tuple[Future[list[int]], list[list[int]]]] = {}  # transfers, with the ranks' failures
        self._problem: Exception | None = None
        self._lock = threading.Lock()  # guards the results and the problem

    def order(self, order: messages.Order, ranks: range | None = None) -> None:
        """Send an order to the given ranks, or to all."""
        encoded = messages.encode(order)
        for group in self.groups:
            group.order(encoded, self.all if ranks is None else ranks)

    def expect(self, step_id: int) -> Future[ModelRunnerOutput]:
        result: Future[ModelRunnerOutput] = Future()
        with self._lock:
            if self._problem is None:
                self._results[step_id] = result
            else:
                result.set_exception(self._problem)
        return result

    def load(self, order: messages.LoadAdapter | TrainerOrder) -> Future[None]:
        loaded: Future[None] = Future()
        with self._lock:
            if self._problem is not None:
                loaded.set_exception(self._problem)
                return loaded
            self._loading[order.key] = loaded, []
        self.order(order)
        return loaded

    def change(self, change: Change) -> Future[None]:
        with self._lock:
            self._changing = changed, _ = Future[None](), list[messages.Changed]()
            if self._problem is not None:
                changed.set_exception(self._problem)
        self.order(change)
        return changed

    def transfer(self, order: Transfer) -> Future[list[int]]:
        moved: Future[list[int]] = Future()
        with self._lock:
            if self._problem is not None:
                moved.set_exception(self._problem)
                return moved
            self._moving[order.number] = moved, []
        self.order(order)
        return moved

    def check(self) -> None:
        """Raises the error that made a rank fail."""
        if self._problem is not None:
            raise self._problem

    def end(self) -> None:
        """End the ranks."""
        while self._closing:
            self._closing.pop()()
        for group in self.groups:
            group.end(END_SECONDS[self._problem is not None])

    def at_end(self, close: Callable[[], None]) -> None:
        """Register a function to call when the ranks end, before those registered earlier."""
        self._closing.append(close)

    # ---- on the threads of the groups

    def replied(self, rank: int, reply: messages.Reply) -> None:
        if isinstance(reply, messages.Result):
            if self._other_stages:
                taken = messages.Take(reply.output.step_id, reply.output.sampled_token_ids)
                self.order(taken, self._other_stages)
            self._take(reply.output)
        elif isinstance(reply, messages.Loaded):
            self._note_loaded(reply)
        elif isinstance(reply, messages.Changed):
            self._note_changed(reply)
        elif isinstance(reply, messages.Transferred):
            self._note_transferred(reply)
        elif isinstance(reply, messages.Ready):
            with self._lock:
                if self._problem is None:
                    self.ready[rank].set_result(reply)

    def failed(self, problem: Exception) -> None:
        """Make all pending and later results raise `problem`. Only the first problem counts."""
        with self._lock:
            if self._problem is None:
                self._problem = problem
                for ready in self.ready:
                    if not ready.done():
                        ready.set_exception(problem)
                for result in self._results.values():
                    result.set_exception(problem)
                if not self._changing[0].done():
                    self._changing[0].set_exception(problem)
                loading = self._loading
                self._loading = {}
                for loaded, _ in loading.values():
                    loaded.set_exception(problem)
                moving = self._moving
                self._moving = {}
                for moved, _ in moving.values():
                    moved.set_exception(problem)

    def _take(self, output: ModelRunnerOutput) -> None:
        with self._lock:
            result = self._results.pop(output.step_id, None)
            if result is not None:  # None if `expect` did not store it: Ctrl-C, or the executor had failed
                result.set_result(output)

    def _note_transferred(self, reply: messages.Transferred) -> None:
        with self._lock:
            moved, failures = self._moving.get(reply.number, (None, []))
            failures.append(reply.failed)
            if moved is None or len(failures) < len(self.all):
                return
            del self._moving[reply.number]
        moved.set_result(sorted(set().union(*failures)))

    def _note_loaded(self, reply: messages.Loaded) -> None:
        with self._lock:
            loaded, replies = self._loading.get(reply.key, (None, []))
            replies.append(reply)
            if loaded is None or len(replies) < len(self.all):
                return
            del self._loading[reply.key]
        problems = [reply for reply in replies if reply.problem is not None]
        if problems:
            problem = min(problems, key=lambda reply: reply.is_busy)
            loaded.set_exception((BusyError if problem.is_busy else ValueError)(problem.problem))
        else:
            loaded.set_result(None)

    def _note_changed(self, reply: messages.Changed) -> None:
        with self._lock:
            changed, replies = self._changing
            replies.append(reply)
            if len(replies) < len(self.all) or changed.done():
                return
        problem = next((reply.problem for reply in replies if reply.problem is not None), None)
        if problem is None:
            changed.set_result(None)
        else:
            changed.set_exception(ValueError(problem))
