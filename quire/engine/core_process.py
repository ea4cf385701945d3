"""An engine core in its own process. It receives orders from clients and returns outputs, as msgpack over ZeroMQ."""

import os
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from quire.cluster.addresses import interface_variables
from quire.cluster.secret import MOST_MESSAGE_BYTES, Admission, ClusterSecret
from quire.config.engine import EngineConfig
from quire.engine.devices import take_devices
from quire.engine.progress import Beats, Progress
from quire.kv.tiers import MEMORY_VARIABLE
from quire.messages import engine as messages
from quire.messages.changes import Look, Pause, TrainerOrder
from quire.messages.engine import CoreReport, EngineCoreOutput, FinishReason, RendezvousPlace
from quire.messages.errors import EngineDeadError, error_text
from quire.observability.logging import LogOptions, configure_logging, logger
from quire.platform.garbage import skip_last_collection
from quire.platform.stacks import FOLDER_VARIABLE, offer_stacks
from quire.platform.termination import leave_end_to_parent
from quire.platform.torch_import import quick_imports

if TYPE_CHECKING:  # the parent of the process imports this file, too
    from quire.engine.core import EngineCore

    _Context = zmq.Context[zmq.Socket[bytes]]

HEARTBEAT_SECONDS = 1.0
JOURNAL = "on-trial"  # a file in the core's folder with the id of the request on trial, see TrialGate
PATIENCE_SECONDS = 2.0  # how long a core may take to shut down before it is killed
_LOAD_SECONDS = 0.1  # how often the core's load is sent to clients without outputs
_IDLE_MILLISECONDS = 1000  # how often an idle core checks its executor
_TOO_LONG = f"the outputs of a step are longer than {MOST_MESSAGE_BYTES >> 20} MiB; ask for fewer logprobs"
_orders = msgspec.msgpack.Decoder(messages.CoreOrder)


def core_address(folder: Path) -> str:
    """Return the address at which a core accepts orders."""
    return f"ipc://{folder}/core"


def run_core(
    folder: Path,
    rank: int,
    config: EngineConfig,
    directory: Path,
    log: LogOptions,
    remote: tuple[str, bytes] | None = None,
    place: RendezvousPlace | None = None,
    listener: socket.socket | None = None,
    memory: str = "",
) -> None:
    """The main function of the process.

    folder: contains the parent's socket "reports"; the core adds its own socket for its clients. rank: the core's
    number. directory: the model's directory or GGUF file. log: the parent's logging options. remote: the address of
    this machine at which clients on other machines reach the core, and the secret they share. place: the rendezvous of
    replicas that share experts, None if this one shares none. listener: the socket of that rendezvous, if this core
    provides it. memory: the parent's file for blocks in CPU memory, which a replacement of this core can reuse.
    """
    _prepare(folder, rank, log, memory)
    context = zmq.Context()
    inbox, outbox = _connect(context, folder)
    report = partial(_send, outbox)
    admission = None
    address = ""
    if remote is not None:
        secret = ClusterSecret(remote[1])
        admission = Admission(context, secret)
        address = secret.listen(inbox, remote[0])  # clients of this machine need no keys
    watched: list[Progress] = []  # the core's, once it accepts orders
    threading.Thread(target=_beat, args=(context, folder, watched), name="heartbeat", daemon=True).start()
    core = None
    try:
        with quick_imports():
            from quire.models.description import describe

            max_model_len = describe(directory, config.model).max_model_len
            take_devices(rank, config)
            from quire.engine.assemble import make_core  # imports torch, which other processes do not need

        if listener is not None:
            from quire.parallel.mesh import open_meeting

            _store = open_meeting(listener.getsockname()[0], listener)  # must live as long as this core
        if place is not None:
            os.environ.update(interface_variables(place.host))
        core = make_core(
            config,
            directory,
            max_model_len,
            place,
            rank,
            journal=folder / JOURNAL,
            report_silence=lambda seconds: report(messages.Busy(seconds)),
        )
        report(_ready(core, address))
        watched.append(core.progress)
        _serve(core, inbox, report)
    except EngineDeadError as error:
        logger.exception("The engine core failed")
        report(messages.CoreDied(error_text(error.__cause__ or error)))
    except Exception as error:
        by_user = core is None and isinstance(error, (ValueError, TypeError, OSError))
        if not by_user:
            logger.exception("The engine core failed")
        report(messages.CoreDied(error_text(error), by_user))
    finally:
        if core is not None:
            core.shutdown()
        if admission is not None:
            admission.close()
        context.destroy(linger=1000)
        skip_last_collection()


def _prepare(folder: Path, rank: int, log: LogOptions, memory: str) -> None:
    """Set up the signals, log, environment and locks of this process."""
    if memory:
        os.environ[MEMORY_VARIABLE] = memory  # for this process and those of its ranks
    leave_end_to_parent()
    configure_logging(*log)
    os.environ[FOLDER_VARIABLE] = str(folder)
    offer_stacks(folder, f"core {rank}")
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared between processes; a killed process would leak it


def _connect(context: "_Context", folder: Path) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
    """Return the socket for clients' orders and the socket for reports to the parent."""
    inbox = context.socket(zmq.ROUTER)
    outbox = context.socket(zmq.PUSH)
    for connection in (inbox, outbox):
        connection.setsockopt(zmq.LINGER, 1000)  # milliseconds to send the last messages
        connection.set_hwm(0)
    inbox.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected client is an error
    inbox.bind(core_address(folder))
    outbox.connect(f"ipc://{folder}/reports")
    return inbox, outbox


def _send(outbox: "zmq.Socket[bytes]", message: CoreReport) -> None:
    outbox.send(msgspec.msgpack.encode(message))


def _ready(core: "EngineCore", address: str) -> messages.CoreReady:
    kv = core.scheduler.kv
    limits = core.scheduler.limits
    tokens = int(kv.room(limits.max_model_len) * limits.max_model_len)
    is_reference = core.executor.runs_reference
    return messages.CoreReady(kv.pool.num_usable, tokens, limits.max_model_len, address, is_reference)


def _beat(context: "_Context", folder: Path, watched: list[Progress]) -> None:
    """Send the parent a heartbeat every second, and end this process when the parent has ended."""
    beats = Beats()
    parent = parent_process()
    assert parent is not None
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{folder}/reports")
    try:
        while not wait([parent.sentinel], HEARTBEAT_SECONDS):
            socket.send(msgspec.msgpack.encode(beats.next(watched[0] if watched else None)))
    except zmq.ZMQError:
        return  # the context was destroyed
    shutil.rmtree(folder, ignore_errors=True)  # the parent can no longer remove it
    time.sleep(PATIENCE_SECONDS)
    os._exit(1)  # the main thread is still loading the model, or is stuck


def _serve(core: "EngineCore", inbox: "zmq.Socket[bytes]", report: Callable[[CoreReport], None]) -> None:
    """Carry out orders and run steps, until the core is shut down or its parent ends."""
    parent = parent_process()
    assert parent is not None
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(parent.sentinel, zmq.POLLIN)
    gates = core.wake_up.fileno()
    poller.register(gates, zmq.POLLIN)
    clients = _Clients(core, inbox)
    has_output = False
    measurement = core.measurement
    while True:
        measures = measurement is not None and core.has_rest and measurement.is_due()
        ready = dict(poller.poll(0 if core.has_work or measures else _IDLE_MILLISECONDS))
        if parent.sentinel in ready:
            return
        if not _carry_out_orders(inbox, clients):
            return
        if not ready:
            core.check()
        if measurement is not None:
            if ready or not core.has_rest:
                measurement.interrupt()
            elif measures:
                measurement.proceed()
        if core.has_work or gates in ready:
            outputs = core.step()
            clients.report(outputs)
            if outputs and not has_output:
                has_output = True
                report(messages.FirstOutput())
        clients.finish_pause()
        clients.finish_exchanges()


def _carry_out_orders(inbox: "zmq.Socket[bytes]", clients: "_Clients") -> bool:
    """Carry out the orders that have arrived. Returns False if the core is to shut down."""
    while inbox.poll(0):
        client, data = inbox.recv_multipart()[:2]
        try:
            order = _orders.decode(data)
        except msgspec.DecodeError as error:
            logger.warning("A client sent an order of %d bytes that has no meaning: %s", len(data), error_text(error))
            continue
        if isinstance(order, messages.Shutdown):
            return False
        clients.obey(client, order)
    return True


class _Clients:
    """The clients of a core, by their addresses. Each gets the outputs of its own requests, and the core's load."""

    def __init__(self, core: "EngineCore", socket: "zmq.Socket[bytes]") -> None:
        self._core = core
        self._socket = socket
        self._num_received: dict[bytes, int] = {}  # by client
        self._addresses: dict[str, bytes] = {}  # each client's latest address, by its name
        self._see_every_step: set[bytes] = set()
        self._owners: dict[str, bytes] = {}  # of unfinished requests
        self._load_is_due = 0.0
        self._pausing: list[tuple[bytes, messages.CarriedOut]] = []  # pauses not reached yet
        self._exchanging: list[tuple[Future[None], bytes, messages.CarriedOut]] = []  # with trainers, unfinished
        self._carried_out: defaultdict[bytes, list[messages.CarriedOut]] = defaultdict(list)  # not reported yet

    def obey(self, client: bytes, order: messages.CoreOrder) -> None:
        """Carry out an order. Requests that cannot run are reported as failed."""
        refused: list[EngineCoreOutput] = []
        if isinstance(order, messages.Connect):
            self._connect(client, order)
        elif client not in self._num_received:
            logger.warning("An order of a client that has not said who it is was dropped")
        elif isinstance(order, messages.AddRequests):
            refused = self._add(client, order)
        elif isinstance(order, messages.AbortRequests):
            self._abort(order.request_ids)
        elif isinstance(order, messages.CarryOut):
            self._carry_out(client, order)
        elif isinstance(order, messages.ResetPrefixCache):
            self._core.reset_prefix_cache(order.external)
        if refused or not self._core.has_unfinished:
            self.report(refused)

    def _connect(self, client: bytes, order: messages.Connect) -> None:
        before = self._addresses.get(order.client, b"")
        if before in self._num_received:
            self._forget(before)
        if order.client:
            self._addresses[order.client] = client
        self._num_received[client] = 0
        if order.every_step:
            self._see_every_step.add(client)

    def _add(self, client: bytes, order: messages.AddRequests) -> list[EngineCoreOutput]:
        """Add requests. Returns the failed outputs of those that cannot run."""
        refused = []
        self._num_received[client] += len(order.requests)
        for request in order.requests:
            self._owners[request.request_id] = client
            try:
                self._core.add_request(request)
            except ValueError as error:
                refused.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error_text(error)))
        return refused

    def _carry_out(self, client: bytes, order: messages.CarryOut) -> None:
        done = messages.CarriedOut(order.number)
        if isinstance(order.command, TrainerOrder):
            self._exchanging.append((self._core.exchange(order.command), client, done))
            return
        if isinstance(order.command, Look):
            done.answer = self._core.look(order.command.viewer)
            self._carried_out[client].append(done)
            self.report([])
            return
        try:
            outputs = self._core.carry_out(order.command)
        except (ValueError, OSError) as error:
            outputs = []
            done.problem = error_text(error)
        if isinstance(order.command, Pause):
            self._pausing.append((client, done))
        else:
            self._carried_out[client].append(done)
        self._load_is_due = 0.0  # so that all clients learn at once whether the core is paused
        self.report(outputs)

    def finish_pause(self) -> None:
        """Reply to the clients that requested a pause when it has been reached or has already ended."""
        if self._pausing and (self._core.has_paused or not self._core.stats.is_paused):
            if self._core.has_paused:
                self._core.finish_pause()
            for client, done in self._pausing:
                self._carried_out[client].append(done)
            self._pausing.clear()
            self.report([])

    def finish_exchanges(self) -> None:
        """Reply to the clients of finished exchanges."""
        for exchange in [exchange for exchange in self._exchanging if exchange[0].done()]:
            future, client, done = exchange
            self._exchanging.remove(exchange)
            if error := future.exception():
                done.problem = error_text(error)
            self._carried_out[client].append(done)
            self.report([])

    def report(self, outputs: list[EngineCoreOutput]) -> None:
        """Send outputs to the clients that wait for them. The load of an idle core is sent to all clients at once."""
        stats = self._core.stats
        now = time.monotonic()
        to_all = not self._core.has_unfinished or now >= self._load_is_due
        if to_all:
            self._load_is_due = now + _LOAD_SECONDS
        parts: defaultdict[bytes, list[EngineCoreOutput]] = defaultdict(list)
        parts.update({client: [] for client in (self._num_received if to_all else self._see_every_step)})
        parts.update({client: [] for client in self._carried_out})
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                parts[owner].append(output)
                if output.finish_reason is not None:
                    del self._owners[output.request_id]
        for client, part in parts.items():
            done = self._carried_out.pop(client, [])
            message = messages.StepOutputs(part, stats, self._num_received.get(client, 0), now, done)
            data = msgspec.msgpack.encode(message)
            if len(data) > MOST_MESSAGE_BYTES:
                self._abort([output.request_id for output in part])
                message.outputs = [EngineCoreOutput(o.request_id, [], FinishReason.ERROR, _TOO_LONG) for o in part]
                data = msgspec.msgpack.encode(message)
            try:
                self._socket.send_multipart([client, data])
            except zmq.ZMQError:
                self._forget(client)

    def _abort(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _forget(self, client: bytes) -> None:
        """Drop a disconnected client's requests and state."""
        self._abort([request_id for request_id, owner in self._owners.items() if owner == client])
        self._num_received.pop(client, None)
        self._carried_out.pop(client, None)
        self._see_every_step.discard(client)
