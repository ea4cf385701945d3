"""The client of the cores. It distributes requests among them, and resends those of a lost core to another."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from quire.cluster.secret import ClusterSecret
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.cores import Cores
from quire.engine.router import Router, producing_core, token_pieces
from quire.messages import engine as messages
from quire.messages.changes import Command, Look, TrainerOrder
from quire.messages.engine import (
    CoreDied,
    CoreEvent,
    CoreLost,
    CoreReady,
    CoreStats,
    CoreUp,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from quire.messages.errors import EngineDeadError
from quire.observability.logging import logger

_DRAIN_MILLISECONDS = 50  # time for the last outputs of a lost core to arrive
_MOST_DRAIN_SECONDS = 1.0
_ANSWER_SECONDS = 10  # after which a warning reports that a core on another machine does not respond
MAX_LOSSES = 5  # the number of charged losses after which a request is ended
LONG_RUN = 100  # tokens from one core that prove that a request can run
_MOST_REQUESTS = 32  # per message, so that messages between machines do not become too long
_outputs = msgspec.msgpack.Decoder(messages.StepOutputs)

Sink = Callable[[int, list[EngineCoreOutput], CoreStats], None]  # a core's number, its outputs, its state afterwards


class CoreState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # requests are accepted, and sent when a core is ready
    DEAD = "dead"


class Processes(Protocol):
    """Starts the cores' processes, and reports when they are up or lost."""

    @property
    def process_ids(self) -> list[int | None]: ...

    async def run(self, tell: Callable[[CoreEvent], None]) -> None: ...

    def kill(self) -> None: ...


@dataclass(eq=False)
class _Unfinished:
    """An unfinished request. token_ids: its output so far. core: the number of the core that runs it, None if it waits
    for a core. num_sent: the length of the output when it was sent to its last core. losses: the number of lost cores
    that it is charged for. trial: see EngineCoreRequest. is_draining: the last outputs of the lost core may still
    arrive."""

    request: EngineCoreRequest
    token_ids: list[int] = field(default_factory=list)
    core: int | None = None
    num_sent: int = 0
    losses: int = 0
    trial: int = 0
    is_draining: bool = False

    @property
    def progress(self) -> int:
        """Return how many tokens its last core has output."""
        return len(self.token_ids) - self.num_sent


@dataclass
class _Core:
    """A client's view of a core. up: the last event that reported it as up. connection: None while there is none."""

    state: CoreState = CoreState.STARTING
    stats: CoreStats = field(default_factory=CoreStats)
    size: CoreReady = field(default_factory=lambda: CoreReady(0, 0, 0))
    up: CoreUp | None = None
    connection: "_Connection | None" = None


@dataclass(eq=False)
class _Connection:
    """breaks: reports when a connection to another machine breaks. readers: the tasks that receive on the sockets."""

    socket: zmq.asyncio.Socket
    breaks: zmq.asyncio.Socket | None = None
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    def stop(self) -> None:
        """Pass no more messages to the readers."""
        if self.breaks is not None:  # before the close: libzmq waits forever to report a break to a closed socket
            self.socket.disable_monitor()
            self.breaks.close(linger=0)
        for reader in self.readers:
            reader.cancel()


def start_cores(config: EngineConfig, directory: Path) -> Cores:
    """Start the cores of this machine, and listen for those of others. Raises ConfigError."""
    if not config.layout.elsewhere:
        return Cores(config, directory)
    from quire.engine.remote_cores import RemoteCores  # imports slow modules that other servers do not need

    return Cores(config, directory, others=RemoteCores(config, directory))


class CoreClient:
    """Sends requests to the cores, and passes their outputs to the sink given to `start`. Cores are numbered from 0;
    core 0 is replica `first` of all replicas.

    The constructor starts the cores' processes, so that they load the model while the caller builds the rest; `start`
    waits for them. End it with `shutdown` or `kill`. Raises ConfigError if no process can be started.

    If a core is lost (killed, stopped, an error in a step, a step that hangs), another one receives its unfinished
    requests together with their output tokens so far. Requests that may have caused the loss are run there one at a
    time; see `_charge`. Use from one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        processes: Processes | None = None,
        index: int = 0,
        since_start: bool = True,
    ) -> None:
        """directory: the model's directory or GGUF file. processes: of cores that also have other clients. index: the
        number of this client among them. since_start: whether no earlier client had this number."""
        self.config = config
        self.directory = directory
        self.index = index
        self.since_start = since_start
        self._processes = processes or start_cores(config, directory)
        self._sink: Sink = lambda core, outputs, stats: None
        self._context = zmq.asyncio.Context()
        self._unfinished: dict[str, _Unfinished] = {}
        self._name = token_hex(8)
        served = config.layout.served
        self.first = served.start
        self._cores = [_Core() for _ in served]
        by_prefix = config.parallel.data_parallel_routing == "prefix"
        self._router = Router(len(self._cores), token_pieces if by_prefix else None, index)
        self._started: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.standing: dict[str, tuple[Command, ...]] = {}  # commands for a core that replaces a lost one, by subject
        self._num_asked = 0
        # By command: the core, and its reply.
        self._asked: dict[int, tuple[int, asyncio.Future[messages.CarriedOut]]] = {}
        self._on_replaced: Callable[[int], None] = lambda core: None
        self.ready: list[int] = []  # the numbers of the cores that accept orders
        self.restarts = 0
        self.cause_of_death = ""

    async def start(self, sink: Sink, on_replaced: Callable[[int], None] = lambda core: None) -> None:
        """Wait until all cores are ready. on_replaced: called with a core's number when it replaces a lost one.

        Raises ConfigError for wrong options, EngineDeadError if a core cannot start.
        """
        self._sink = sink
        self._on_replaced = on_replaced
        self._started = asyncio.get_running_loop().create_future()
        self._run(self._processes.run(self._told))
        await self._started

    def add(self, requests: list[EngineCoreRequest], core: int | None = None) -> None:
        """Send requests to cores, or queue them until one is ready. core: the number of the core to use.

        Raises EngineDeadError if the client has given up."""
        self.check()
        added = [_Unfinished(request) for request in requests]
        self._unfinished.update((unfinished.request.request_id, unfinished) for unfinished in added)
        self._send(added, core)

    def abort(self, request_ids: list[str]) -> None:
        batches: defaultdict[int | None, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if unfinished := self._unfinished.pop(request_id, None):
                batches[unfinished.core].append(request_id)
        for core, batch in batches.items():
            self._order(core, messages.AbortRequests(batch))

    def reset_prefix_cache(self, external: bool = False) -> None:
        for core in self.ready:  # a new core's cache is empty
            self._order(core, messages.ResetPrefixCache(external))

    async def carry_out(self, *commands: Command | TrainerOrder | Look) -> list[bytes]:
        """Carry out commands on all ready cores. Returns their replies. Raises ValueError if one fails."""
        self.check()
        ended = await asyncio.gather(*(self._ask(core, command) for command in commands for core in self.ready))
        if problem := next((done.problem for done in ended if done.problem), None):
            raise ValueError(problem)
        return [done.answer for done in ended]

    async def carry_out_at(self, core: int, command: Command | TrainerOrder) -> None:
        """Carry out a command on one core. Raises ValueError if it fails."""
        if problem := (await self._ask(core, command)).problem:
            raise ValueError(problem)

    def _ask(self, core: int, command: Command | TrainerOrder | Look) -> asyncio.Future[messages.CarriedOut]:
        """Send a command. Returns the future of its reply."""
        answer: asyncio.Future[messages.CarriedOut] = asyncio.get_running_loop().create_future()
        number = self._num_asked = self._num_asked + 1
        self._asked[number] = core, answer
        self._order(core, messages.CarryOut(number, command))
        return answer

    def check(self) -> None:
        if self.state is CoreState.DEAD:
            raise EngineDeadError(f"the engine failed: {self.cause_of_death}")

    @property
    def state(self) -> CoreState:
        """The state of the cores: READY if at least one serves requests."""
        states = {core.state for core in self._cores}
        order = (CoreState.READY, CoreState.RESTARTING, CoreState.STARTING)
        return next((state for state in order if state in states), CoreState.DEAD)

    @property
    def stats(self) -> CoreStats:
        """Return the sum of the cores' last reports."""
        return CoreStats.total([core.stats for core in self._cores])

    @property
    def sizes(self) -> list[CoreReady]:
        return [core.size for core in self._cores]

    @property
    def num_unfinished(self) -> int:
        """The number of sequences that are in a core or wait to be sent to one."""
        return len(self._unfinished)

    @property
    def process_ids(self) -> list[int | None]:
        """Return the cores' process ids by number; None for a core that is being replaced."""
        return self._processes.process_ids

    def core_of(self, request_id: str) -> int:
        """Return the number of the core that runs an unfinished request, 0 if none does yet."""
        unfinished = self._unfinished.get(request_id)
        return (unfinished and unfinished.core) or 0

    async def shutdown(self) -> None:
        """End the cores. Unfinished requests get no further output."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.kill()

    def kill(self) -> None:
        """End the cores' processes at once."""
        self._processes.kill()
        self.cause_of_death = self.cause_of_death or "it was shut down"
        self.ready = []
        for core in self._cores:
            core.state = CoreState.DEAD
        self._context.destroy(linger=0)

    # ---- cores that come and go

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _told(self, event: CoreEvent) -> None:
        if isinstance(event, CoreUp):
            self._connect(event)
        else:
            self._lose(event)

    def _connect(self, up: CoreUp) -> None:
        """Connect to a core that accepts orders. A core on another machine is ready after its first reply."""
        number = up.rank - self.first
        core = self._cores[number]
        if core.connection is not None:
            self._lose(CoreLost(up.rank, CoreDied("it was started again"), given_up=False))
        if core.up is not None and core.up.address != up.address:  # a new core, which counts from 0
            core.stats = CoreStats()
            self._sink(number, [], core.stats)
        core.up = up
        core.size = up.size
        core.stats = msgspec.structs.replace(core.stats, runs_reference=up.size.runs_reference)
        socket = self._context.socket(zmq.DEALER)
        core.connection = connection = _Connection(socket)
        socket.set_hwm(0)
        if up.secret:
            connection.breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            ClusterSecret(up.secret).connect(socket, up.address)
            connection.readers.append(self._run(self._reconnect(up, connection.breaks)))
        else:
            socket.connect(up.address)
        connection.readers.append(self._run(self._read(number, socket)))
        self._order(number, messages.Connect(every_step=self.index == 0, client=self._name))
        for command in chain(*self.standing.values()):
            self._order(number, messages.CarryOut(0, command))
        if not up.secret:
            self._is_ready(number)

    def _is_ready(self, number: int) -> None:
        core = self._cores[number]
        was_lost = core.state is CoreState.RESTARTING
        core.state = CoreState.READY
        self._list_ready()
        if was_lost:
            logger.warning("Engine core %d runs again", self.first + number)
            self._on_replaced(number)
        waiting = [u for u in self._unfinished.values() if u.core is None and not u.is_draining]
        self._send(waiting)
        if self._started is not None and not self._started.done() and len(self.ready) == len(self._cores):
            self._started.set_result(None)

    def _list_ready(self) -> None:
        self.ready = [number for number, core in enumerate(self._cores) if core.state is CoreState.READY]

    async def _reconnect(self, up: CoreUp, breaks: zmq.asyncio.Socket) -> None:
        """Reconnect when the connection to a core on another machine breaks. No message is sent twice on a
        connection."""
        core = self._cores[up.rank - self.first]
        if not await breaks.poll(_ANSWER_SECONDS * 1000) and core.state is not CoreState.READY:
            logger.warning(
                "Engine core %d has not answered at %s for %d s; can this machine connect to it?",
                up.rank,
                up.address,
                _ANSWER_SECONDS,
            )
        await breaks.recv_multipart()
        self._lose(CoreLost(up.rank, CoreDied("the connection to it broke"), given_up=False))
        self._connect(up)

    def _lose(self, event: CoreLost) -> None:
        number = event.rank - self.first
        core = self._cores[number]
        self.restarts += core.state is CoreState.READY and not event.given_up
        core.state = CoreState.DEAD if event.given_up else CoreState.RESTARTING
        self.cause_of_death = event.died.reason
        self._list_ready()
        lost = [unfinished for unfinished in self._unfinished.values() if unfinished.core == number]
        for unfinished in lost:
            unfinished.core = None
            unfinished.is_draining = True
        for asked, (core_of, answer) in list(self._asked.items()):
            if core_of == number:  # the core that replaces it receives the standing commands
                del self._asked[asked]
                answer.set_result(messages.CarriedOut(asked))
        self._router.forget(number)
        connection = core.connection
        core.connection = None
        if connection is not None:
            connection.stop()
        self._run(self._replay(event, lost, connection))

    async def _replay(self, event: CoreLost, lost: list[_Unfinished], connection: _Connection | None) -> None:
        """Send the requests of a lost core to another one, and end those that cannot be resent."""
        number = event.rank - self.first
        core = self._cores[number]
        if connection is not None:
            end = time.monotonic() + _MOST_DRAIN_SECONDS  # it may still run if only its machine was lost
            while time.monotonic() < end and await connection.socket.poll(_DRAIN_MILLISECONDS):
                report = _outputs.decode(await connection.socket.recv())
                if core.connection is None:
                    core.stats = report.stats
                self._pass_on(number, report)
            connection.socket.close(linger=0)
        if core.connection is None:
            core.stats = msgspec.structs.replace(core.stats, num_running=0, num_waiting=0, kv_cache_usage=0.0)
            self._sink(number, [], core.stats)
        for unfinished in lost:
            unfinished.is_draining = False
        lost = [unfinished for unfinished in lost if unfinished.request.request_id in self._unfinished]
        culprits = self._charge(lost, event.died)
        self._end(culprits, "the engine failed twice while it ran this request; it is not tried again")
        if self.state is CoreState.DEAD:
            self._end(list(self._unfinished.values()), f"the engine failed: {event.died.reason}")
        again = [unfinished for unfinished in lost if unfinished.request.request_id in self._unfinished]
        if again:
            logger.warning("%d requests of engine core %d go on", len(again), event.rank)
        self._send(again)
        if event.given_up and self._started is not None and not self._started.done():
            kind = ConfigError if event.died.by_user else EngineDeadError
            self._started.set_exception(kind(event.died.reason))

    def _charge(self, lost: list[_Unfinished], died: CoreDied) -> list[_Unfinished]:
        """Find out which requests may have caused the loss of a core. Returns those that are not retried.

        A request is charged if the core had not output any of its tokens. If the core had output tokens of all
        requests, all are charged. Charged requests are put on trial in the next core, see TrialGate. Requests without
        output are put on trial at once. Others are put on trial if they are charged again, if they were alone, or if
        the core hung, since another hang costs more than trials. If that core is lost, too, the request on trial is the
        culprit: it ends, and no other is charged.
        """
        suspects = [unfinished for unfinished in lost if not unfinished.progress]
        if died.culprit is not None:
            for unfinished in lost:
                unfinished.trial = 0 if unfinished.progress else unfinished.trial
            return [unfinished for unfinished in lost if unfinished.request.request_id == died.culprit]
        for unfinished in lost:
            unfinished.trial = 0
            if unfinished.progress >= LONG_RUN:
                unfinished.losses = 0
        charged = suspects or lost
        for unfinished in charged:
            unfinished.losses += 1
            if suspects or died.silent or len(lost) == 1 or unfinished.losses > 1:
                unfinished.trial = min(unfinished.progress, LONG_RUN) + 1
        most = MAX_LOSSES
        if self.config.parallel.shares_experts:  # all cores end together, so the culprit is unknown
            most = 1
            for unfinished in charged:
                unfinished.trial = 0
        return [unfinished for unfinished in charged if unfinished.losses > most]

    # ---- messages

    def _order(self, core: int | None, order: messages.CoreOrder) -> None:
        """Send an order to a core, if it is ready."""
        connection = None if core is None else self._cores[core].connection
        if connection is not None:  # without a high-water mark, sending never waits, so the returned future is done
            connection.socket.send(msgspec.msgpack.encode(order))

    def _send(self, requests: Iterable[_Unfinished], core: int | None = None) -> None:
        """Send each request to a core, with its output so far. core: the core to use if it is ready."""
        least = len(self._cores) if self.config.parallel.shares_experts else 1  # these run only together
        if len(self.ready) < least:
            return  # `_is_ready` sends them
        batches: defaultdict[int, list[EngineCoreRequest]] = defaultdict(list)
        for unfinished in sorted(requests, key=lambda unfinished: unfinished.trial > 0):
            request = unfinished.request
            output = unfinished.token_ids
            trial = unfinished.trial
            unfinished.num_sent = len(output)
            wanted = producing_core(request, len(self._cores), core)
            rank = unfinished.core = self._router.route(request, self.ready, wanted if wanted in self.ready else None)
            if output or trial:
                request = msgspec.structs.replace(request, output_token_ids=output, trial=trial)
            batches[rank].append(request)
        for rank, batch in batches.items():
            for start in range(0, len(batch), _MOST_REQUESTS):
                self._order(rank, messages.AddRequests(batch[start : start + _MOST_REQUESTS]))

    async def _read(self, number: int, socket: zmq.asyncio.Socket) -> None:
        core = self._cores[number]
        while True:
            report = _outputs.decode(await socket.recv())
            core.stats = report.stats
            self._router.report(number, report.stats.num_waiting, report.stats.num_running, report.num_received)
            if core.state is not CoreState.READY:
                self._is_ready(number)
            self._pass_on(number, report)
            for done in report.carried_out:
                if done.number in self._asked:
                    self._asked.pop(done.number)[1].set_result(done)
                elif done.problem is not None:
                    logger.error("Engine core %d was told again what stands: %s", self.first + number, done.problem)

    def _pass_on(self, number: int, report: messages.StepOutputs) -> None:
        """Pass a core's outputs to the sink."""
        core = self._cores[number]
        known = []
        is_remote = core.up is not None and core.up.secret
        for output in report.outputs:
            unfinished = self._unfinished.get(output.request_id)
            if unfinished is None:
                continue  # aborted while this output was in transit
            unfinished.token_ids += output.new_token_ids
            if output.finish_reason is not None:
                del self._unfinished[output.request_id]
            if is_remote and output.scheduled_at:
                output.scheduled_at += time.monotonic() - report.sent_at  # machines' clocks start at different times
            known.append(output)
        self._sink(number, known, core.stats)

    def _end(self, requests: list[_Unfinished], reason: str) -> None:
        for unfinished in requests:
            request_id = unfinished.request.request_id
            core = unfinished.core or 0
            del self._unfinished[request_id]
            logger.error("Request %s failed: %s", request_id, reason)
            self._sink(core, [EngineCoreOutput(request_id, [], FinishReason.ERROR, reason)], self._cores[core].stats)
