"""The core processes of an engine, one for each replica of the model. A lost process is replaced."""

import asyncio
import multiprocessing
import shutil
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from quire.config.engine import ConfigError, EngineConfig
from quire.engine.core_process import JOURNAL, PATIENCE_SECONDS, core_address, run_core
from quire.engine.progress import Watchdog
from quire.engine.replica_group import LocalRendezvous, Rendezvous, ReplicaGroup
from quire.engine.trials import read_journal
from quire.kv.kept_memory import KeptMemory
from quire.messages import engine as messages
from quire.messages.engine import CoreDied, CoreEvent, CoreLost, CoreReady, CoreUp
from quire.messages.errors import error_text
from quire.observability.logging import log_options, logger
from quire.platform.folders import private_folder
from quire.platform.stacks import collect_stacks

SILENCE_SECONDS = 5.0  # a core that sends no heartbeat for this long is considered lost
SILENT_START_SECONDS = 60.0  # the same while the core starts: imports can block its heartbeat thread for long
MAX_FAILED_STARTS = 3  # consecutive failed starts after which a core is given up
_LONGEST_POLL_SECONDS = 1.0  # a longer poll means that this process was stopped, not the core
_SOCKET_PATH = 107  # maximum length of a socket's path
_reports = msgspec.msgpack.Decoder(messages.CoreReport)


_Remote = tuple[str, bytes] | None  # where cores accept orders from other machines, see `run_core`


class OtherMachines(Rendezvous, Protocol):
    """The cores of other machines."""

    async def run(self, tell: Callable[[CoreEvent], None], replica_group: ReplicaGroup | None) -> None:
        """Report the cores' events until all are given up. replica_group: the replicas of this machine, if they share
        experts with these."""

    def close(self) -> None:
        """Disconnect from the other machines."""


class _Process:
    """The process of one core, and the socket on which it reports. A replacement core gets a new socket folder, so that
    messages of the old core cannot arrive.

    When this process ends, the core's process is ended and the sockets' folder is removed, unless this process is
    killed by a signal (then the core's process does both).
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        rank: int,
        config: EngineConfig,
        directory: Path,
        remote: _Remote,
        replica_group: ReplicaGroup | None,
        memory: str,
    ) -> None:
        folder = private_folder("quire-", longest=_SOCKET_PATH - len("/reports"))
        processes: list[BaseProcess] = []
        # At exit, multiprocessing waits for its processes; finalizers with a priority run first.
        self._end = Finalize(self, _end, (processes, folder), exitpriority=1)
        self.address = core_address(folder)
        self._folder = folder
        self.reports = context.socket(zmq.PULL)
        self.reports.set_hwm(0)
        self.reports.bind(f"ipc://{folder}/reports")
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_core,
            name=f"core {rank}",
            args=(
                folder,
                rank,
                config,
                directory,
                log_options(),
                remote,
                *(() if replica_group is None else replica_group.rendezvous.place(rank)),
            ),
            kwargs={"memory": memory},
        )
        self.process.start()
        processes.append(self.process)

    def on_trial(self) -> str | None:
        """Return the id of the request that was on trial when the core was lost, see TrialGate."""
        return read_journal(self._folder / JOURNAL)

    def log_stacks(self) -> None:
        """Log the stacks of the core's and its ranks' threads."""
        for name, stacks in collect_stacks(self._folder).items():
            logger.error("The threads of %s, before it is ended:\n%s", name, stacks)

    async def close(self, patience: float) -> None:
        """End the process. patience: seconds to wait before killing it."""
        self.reports.close(linger=0)
        await asyncio.to_thread(self.process.join, patience)
        self._end()

    def kill(self) -> None:
        self.reports.close(linger=0)
        self._end()


def _end(processes: list[BaseProcess], folder: Path) -> None:
    for process in processes:
        process.kill()
        process.join()
    shutil.rmtree(folder, ignore_errors=True)


class _Replica:
    """One core and its replacements. replica_group: None if the replica shares no experts with others."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        rank: int,
        config: EngineConfig,
        directory: Path,
        remote: _Remote,
        replica_group: ReplicaGroup | None,
    ) -> None:
        self._memory = KeptMemory(config)
        self._context = context
        self._arguments = (context, rank, config, directory, remote, replica_group, self._memory.path)
        self.rank = rank
        self._replica_group = replica_group
        self.process: _Process | None = None
        self._is_ready = self._was_ready = False
        self._silence = 0.0  # seconds; negative if the core may be silent for longer
        self._failed_starts = 0
        self._watchdog = Watchdog(config.scheduler.watchdog_timeout, config.model.torch_compile)

    def launch(self) -> _Process:
        """Return the running process, or start one. Raises ConfigError if none can be started."""
        try:
            self.process = self.process or _Process(*self._arguments)
        except (OSError, zmq.ZMQError) as error:  # for example, the socket folder cannot be created
            raise ConfigError(error_text(error)) from error
        return self.process

    async def run(self, tell: Callable[[CoreEvent], None]) -> None:
        """Keep a core running until further restarts are pointless."""
        given_up = False
        while not given_up:
            process = None
            patience = PATIENCE_SECONDS
            try:
                if self._replica_group is not None:
                    await self._replica_group.rendezvous.begin()
                process = self.launch()
                self._failed_starts += 1
                self._silence = 0.0
                died = await self._listen(process, tell)
                patience = 0.0 if died.silent else PATIENCE_SECONDS
                is_own = self._replica_group is None or self._replica_group.lost is None
                if self._replica_group is None:
                    self._name_culprit(died, process)
                given_up = died.by_user or not self._was_ready or self._failed_starts >= MAX_FAILED_STARTS
                given_up = self._lost(died, given_up, tell)
                if died.silent and is_own:
                    await asyncio.to_thread(process.log_stacks)
            except ConfigError as error:
                given_up = self._lost(CoreDied(error_text(error), by_user=True), True, tell)
            except asyncio.CancelledError:
                patience = PATIENCE_SECONDS if self._is_ready else 0.0
                if self._is_ready and process is not None:
                    self._tell_to_end(process.address)
                raise
            finally:
                self._is_ready = False
                if process is not None:
                    await process.close(patience)
                    self.process = None
            if self._replica_group is not None and not given_up:
                await self._replica_group.end()

    def _name_culprit(self, died: CoreDied, process: _Process) -> None:
        """If a request was on trial, record that it caused the loss: the core itself can start again."""
        if culprit := process.on_trial():
            died.culprit = culprit
            self._failed_starts = 0

    def _lost(self, died: CoreDied, given_up: bool, tell: Callable[[CoreEvent], None]) -> bool:
        """Report a lost core. Returns whether it is given up."""
        if self._replica_group is not None:
            given_up = self._replica_group.lose(self.rank, died, given_up, tell)
        if self._was_ready:
            fate = "it is given up" if given_up else "starting another"
            logger.error("Engine core %d was lost: %s; %s", self.rank, died.reason, fate)
        if self._replica_group is None:
            tell(CoreLost(self.rank, died, given_up))
        return given_up

    async def _listen(self, process: _Process, tell: Callable[[CoreEvent], None]) -> CoreDied:
        """Handle the core's reports until it is lost. Returns the reason."""
        while True:
            if self._replica_group is not None and self._replica_group.lost is not None:
                return self._replica_group.lost[0]
            began = time.monotonic()
            if not await process.reports.poll(timeout=250):
                if not process.process.is_alive():
                    return CoreDied(f"its process ended unexpectedly (exit code {process.process.exitcode})")
                patience = SILENCE_SECONDS if self._is_ready else SILENT_START_SECONDS
                self._silence += min(time.monotonic() - began, _LONGEST_POLL_SECONDS)
                if self._silence > patience:
                    return CoreDied(f"its process has been silent for {patience:.0f} s", silent=True)
                continue
            report = _reports.decode(await process.reports.recv())
            if (died := self._handle(report, process.address, tell)) is not None:
                return died

    def _handle(self, report: messages.CoreReport, address: str, tell: Callable[[CoreEvent], None]) -> CoreDied | None:
        """Handle a report. Returns the reason if it shows that the core is lost, otherwise None."""
        self._silence = min(self._silence, 0.0)
        if isinstance(report, CoreReady):
            self._is_ready = self._was_ready = True
            tell(CoreUp(self.rank, report.address or address, report))
        elif isinstance(report, messages.FirstOutput):
            self._failed_starts = 0
        elif isinstance(report, messages.Busy):
            self._silence = -report.seconds
        elif isinstance(report, messages.Heartbeat):
            if problem := self._watchdog.problem(report):
                return CoreDied(problem, silent=True)
        elif isinstance(report, CoreDied):
            return report
        return None

    def _tell_to_end(self, address: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.connect(address)
        # Sending does not wait, so the returned future is done.
        socket.send(msgspec.msgpack.encode(messages.Shutdown()))
        socket.close(linger=1000)


class Cores:
    """Starts a process for each replica of this machine, and restarts lost ones (killed, stopped or failed). If this
    machine has the server, cores of other machines join here.

    The constructor starts them, so that they load the model while the caller builds the rest; `run` watches them. Use
    from one event loop. Raises ConfigError if no process can be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        remote: _Remote = None,
        rendezvous: Rendezvous | None = None,
        others: OtherMachines | None = None,
    ) -> None:
        """directory: the model's directory or GGUF file. remote: see `run_core`. rendezvous: of replicas that share
        experts, if another machine provides it; the cores then start once it is known. others: the cores of other
        machines, if this one has the server."""
        self.config = config
        self.directory = directory
        self._context = zmq.asyncio.Context()
        layout = config.layout
        self._others = others
        self.replica_group: ReplicaGroup | None = None
        if config.parallel.shares_experts:
            everyone = layout.served or layout.here
            self.replica_group = ReplicaGroup(layout.here, everyone, rendezvous or others or LocalRendezvous())
        self._replicas = [
            _Replica(self._context, rank, config, directory, remote, self.replica_group) for rank in layout.here
        ]
        try:
            for replica in self._replicas if rendezvous is None else ():
                replica.launch()
        except ConfigError:
            self.kill()
            raise

    @property
    def process_ids(self) -> list[int | None]:
        """Return the process ids of this machine's cores; None for a core that is being replaced."""
        return [None if r.process is None else r.process.process.pid for r in self._replicas]

    async def run(self, tell: Callable[[CoreEvent], None]) -> None:
        """Replace lost cores until all are given up. Cancel it to end the cores. tell: called with each event."""
        everyone = [replica.run(tell) for replica in self._replicas]
        await asyncio.gather(*everyone, *([] if self._others is None else [self._others.run(tell, self.replica_group)]))

    def kill(self) -> None:
        """End the processes at once."""
        for replica in self._replicas:
            if replica.process is not None:
                replica.process.kill()
                replica.process = None
        if self._others is not None:
            self._others.close()
        self._context.destroy(linger=0)
