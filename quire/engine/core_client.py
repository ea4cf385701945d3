"""The client of a core in another process. It replaces a lost core, and sends it the unfinished requests again."""

import asyncio
import contextlib
import multiprocessing
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from quire.config import ConfigError, EngineConfig
from quire.engine.core import EngineDeadError
from quire.engine.core_process import PATIENCE_SECONDS, run_core
from quire.messages import engine as messages
from quire.messages.engine import CoreDied, CoreReady, CoreStats, EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.errors import error_text
from quire.metrics.logging import logger, logging_level
from quire.system.folders import private_folder

SILENCE_SECONDS = 5.0  # a core that sends no heartbeat for this long is considered lost
SILENT_START_SECONDS = 60.0  # the same while the core starts: imports can block its heartbeat thread for long
_SOCKET_PATH = 107  # characters that the path of a socket may have
MAX_FAILED_STARTS = 3  # failed starts in a row, after which the client gives up
_reports = msgspec.msgpack.Decoder(messages.CoreReport)

Sink = Callable[[list[EngineCoreOutput], CoreStats], None]  # a step's outputs, and the core's state after it


class CoreState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # requests are accepted, and sent when the new core is ready
    DEAD = "dead"


@dataclass
class _Unfinished:
    """An unfinished request. token_ids: its output so far. losses: how many cores were lost while they ran it."""

    request: EngineCoreRequest
    token_ids: list[int] = field(default_factory=list)
    losses: int = 0


class _Link:
    """The sockets and the process of one core. A new core gets a new link, so messages of the old one cannot arrive.

    When this process ends, the core's process is ended and the sockets' folder is removed, unless this process is
    killed by a signal (then the core's process does both).
    """

    def __init__(self, context: zmq.asyncio.Context, config: EngineConfig, directory: Path) -> None:
        folder = private_folder("quire-", longest=_SOCKET_PATH - len("/reports"))
        processes: list[BaseProcess] = []
        # At exit, multiprocessing waits for its processes. Finalizers with a priority run before that.
        self._end = Finalize(self, _end, (processes, folder), exitpriority=1)
        self.orders, self.reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, name in ((self.orders, "orders"), (self.reports, "reports")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"ipc://{folder}/{name}")
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_core, args=(folder, config, directory, logging_level()), name="quire-core"
        )
        self.process.start()
        processes.append(self.process)

    async def close(self, patience: float) -> None:
        """Close the sockets and end the process. patience: seconds in which it may end by itself."""
        self.orders.close(linger=1000)
        self.reports.close()
        await asyncio.to_thread(self.process.join, patience)
        self._end()

    def kill(self) -> None:
        self.orders.close(linger=0)
        self.reports.close(linger=0)
        self._end()


def _end(processes: list[BaseProcess], folder: Path) -> None:
    for process in processes:
        process.kill()
        process.join()
    shutil.rmtree(folder, ignore_errors=True)


class CoreClient:
    """Starts a core's process, sends requests to it, and passes its outputs to the sink that `start` is given.

    The constructor starts the process, so that it loads the model while the caller builds the rest; `start` waits for
    it. End it with `shutdown` or `kill`. Raises ConfigError if no process can be started.

    If the core is lost (killed, stopped, an error in a step), a new one gets every unfinished request together with its
    output tokens so far. A request that is lost a second time ends with an error. Use from one event loop.
    """

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        """directory: the model's directory or GGUF file."""
        self.config, self.directory = config, directory
        self._sink: Sink = lambda outputs, stats: None
        self._context = zmq.asyncio.Context()
        self._unfinished: dict[str, _Unfinished] = {}
        self._link: _Link | None = self._launch()
        self._task: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._failed_starts = 0
        self.state = CoreState.STARTING
        self.stats = CoreStats()
        self.size = CoreReady(0, 0, 0)
        self.restarts = 0
        self.cause_of_death = ""

    async def start(self, sink: Sink) -> None:
        """Wait until the core is ready. Raises ConfigError for wrong options, EngineDeadError if it cannot start."""
        self._sink = sink
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(ready), name="core client")
        await ready.wait()
        if self._task.done():
            await self._task

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Send requests to the core, or keep them until it is ready. Raises EngineDeadError if the client gave up."""
        self.check()
        for request in requests:
            self._unfinished[request.request_id] = _Unfinished(request)
        if self.state is CoreState.READY:  # otherwise `_begin` sends them
            self._order(messages.AddRequests(requests))

    def abort(self, request_ids: list[str]) -> None:
        known = [request_id for request_id in request_ids if self._unfinished.pop(request_id, None)]
        if known and self.state is CoreState.READY:
            self._order(messages.AbortRequests(known))

    def reset_prefix_cache(self) -> None:
        if self.state is CoreState.READY:  # a new core's cache is empty
            self._order(messages.ResetPrefixCache())

    def check(self) -> None:
        if self.state is CoreState.DEAD:
            raise EngineDeadError(f"the engine failed: {self.cause_of_death}")

    @property
    def num_unfinished(self) -> int:
        """Sequences that are in the core, or wait to be sent to it."""
        return len(self._unfinished)

    @property
    def process_id(self) -> int | None:
        return None if self._link is None else self._link.process.pid

    async def shutdown(self) -> None:
        """End the core. Unfinished requests get no further output."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineDeadError, ConfigError):
                await self._task
        self.state, self.cause_of_death = CoreState.DEAD, self.cause_of_death or "it was shut down"
        self.kill()

    def kill(self) -> None:
        """End the core's process at once, if there is one."""
        if self._link is not None:
            self._link.kill()
            self._link = None
        self._context.destroy(linger=0)

    # ---- the life of a core

    def _launch(self) -> _Link:
        try:
            return _Link(self._context, self.config, self.directory)
        except (OSError, zmq.ZMQError) as error:  # for example, no folder for the sockets can be made
            raise ConfigError(error_text(error)) from error

    def _order(self, order: messages.CoreOrder) -> None:
        assert self._link is not None
        # The socket has no high-water mark, so sending never waits and the returned future is done.
        self._link.orders.send(msgspec.msgpack.encode(order))

    async def _run(self, ready: asyncio.Event) -> None:
        """Keep a core running until there is no hope that another start helps."""
        try:
            while True:
                try:
                    self._link = self._link or self._launch()
                except ConfigError as error:
                    self._lost(CoreDied(error_text(error), by_user=True), ready.is_set())
                    raise
                self._failed_starts += 1
                self._heard_at = time.monotonic()
                died, patience = CoreDied(""), PATIENCE_SECONDS
                try:
                    died = await self._listen(self._link, ready)
                    patience = 0.0 if died.silent else PATIENCE_SECONDS
                except asyncio.CancelledError:
                    self._order(messages.Shutdown())
                    raise
                finally:
                    await self._link.close(patience)
                    self._link = None
                self._lost(died, ready.is_set())
                if self.state is CoreState.DEAD:
                    kind = ConfigError if died.by_user else EngineDeadError
                    raise kind(self.cause_of_death)
        finally:
            ready.set()

    def _lost(self, died: CoreDied, was_ready: bool) -> None:
        """Decide whether to start another core, and end the requests that will not be sent to it."""
        held_requests, self.state = self.state is CoreState.READY, CoreState.RESTARTING
        self.cause_of_death, self.stats = died.reason, CoreStats()
        self._sink([], self.stats)
        hopeless = died.by_user or not was_ready or self._failed_starts >= MAX_FAILED_STARTS
        if was_ready:
            logger.error("The engine core was lost: %s%s", died.reason, "" if hopeless else "; starting another")
        repeated = []
        for request_id, unfinished in self._unfinished.items():
            unfinished.losses += held_requests
            if unfinished.losses > 1:
                repeated.append(request_id)
        self._end(repeated, "the engine failed twice while it ran this request; it is not tried again")
        self.restarts += not hopeless
        if hopeless:
            self.state = CoreState.DEAD
            self._end(list(self._unfinished), f"the engine failed: {died.reason}")

    async def _listen(self, link: _Link, ready: asyncio.Event) -> CoreDied:
        """Handle the core's reports until it is lost. Returns the reason."""
        while True:
            if not await link.reports.poll(timeout=250):
                if not link.process.is_alive():
                    return CoreDied(f"its process ended unexpectedly (exit code {link.process.exitcode})")
                patience = SILENCE_SECONDS if self.state is CoreState.READY else SILENT_START_SECONDS
                if time.monotonic() - self._heard_at > patience:
                    return CoreDied(f"its process has been silent for {patience:.0f} s", silent=True)
                continue
            report = _reports.decode(await link.reports.recv())
            self._heard_at = time.monotonic()
            if isinstance(report, messages.StepOutputs):
                self._take(report)
            elif isinstance(report, CoreReady):
                self._begin(report, ready)
            elif isinstance(report, CoreDied):
                return report

    def _begin(self, size: CoreReady, ready: asyncio.Event) -> None:
        self.size, self.state = size, CoreState.READY
        if ready.is_set():
            logger.warning("The engine core runs again; %d requests go on", len(self._unfinished))
        if self._unfinished:
            lost = self._unfinished.values()
            again = [msgspec.structs.replace(u.request, output_token_ids=u.token_ids) for u in lost]
            self._order(messages.AddRequests(again))
        ready.set()

    def _take(self, report: messages.StepOutputs) -> None:
        self.stats = report.stats
        known = []
        for output in report.outputs:
            unfinished = self._unfinished.get(output.request_id)
            if unfinished is None:
                continue  # aborted while this output was on its way
            unfinished.token_ids += output.new_token_ids
            if output.finish_reason is not None:
                del self._unfinished[output.request_id]
            known.append(output)
        if known:
            self._failed_starts = 0
        self._sink(known, report.stats)

    def _end(self, request_ids: list[str], reason: str) -> None:
        for request_id in request_ids:
            del self._unfinished[request_id]
            logger.error("Request %s failed: %s", request_id, reason)
        if request_ids:
            ended = [EngineCoreOutput(request_id, [], FinishReason.ERROR, reason) for request_id in request_ids]
            self._sink(ended, self.stats)
