"""An engine core in its own process. It receives orders and sends reports, as msgpack over ZeroMQ."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import zmq
from tqdm import tqdm

from quire.config import EngineConfig
from quire.engine.core import EngineCore, EngineDeadError
from quire.messages import engine as messages
from quire.messages.engine import CoreReport, EngineCoreOutput, FinishReason
from quire.messages.errors import error_text
from quire.metrics.logging import configure_logging, logger
from quire.system.garbage import skip_last_collection

HEARTBEAT_SECONDS = 1.0
PATIENCE_SECONDS = 2.0  # how long a core that has to end may take, before it is killed
_orders = msgspec.msgpack.Decoder(messages.CoreOrder)


def run_core(folder: Path, config: EngineConfig, directory: Path, log: str) -> None:
    """The main function of the process.

    folder: contains the client's sockets "orders" and "reports". directory: the model's directory or GGUF file. log:
    the level of the log.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # often sent to the whole group of processes; the client decides
        signal.signal(number, signal.SIG_IGN)
    configure_logging(log)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared between processes; a killed process would leak it
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, name in ((inbox, "orders"), (outbox, "reports")):
        socket.setsockopt(zmq.LINGER, 1000)  # milliseconds to send the last reports
        socket.set_hwm(0)
        socket.connect(f"ipc://{folder}/{name}")

    def report(message: CoreReport) -> None:
        outbox.send(msgspec.msgpack.encode(message))

    threading.Thread(target=_beat, args=(context, folder), name="heartbeat", daemon=True).start()
    core = None
    try:
        from quire.engine.client import make_core  # imports torch, which the client's process does not need
        from quire.models.description import describe

        core = make_core(config, directory, describe(directory, config.model).max_model_len)
        kv, limits = core.scheduler.kv, core.scheduler.limits
        tokens = int(kv.room(limits.max_model_len) * limits.max_model_len)
        report(messages.CoreReady(kv.pool.num_usable, tokens, limits.max_model_len))
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
        context.destroy(linger=1000)
        skip_last_collection()


def _beat(context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
    """Send the client a heartbeat every second, and end this process when the client has ended."""
    client = parent_process()
    assert client is not None
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{folder}/reports")
    message = msgspec.msgpack.encode(messages.Heartbeat())
    try:
        while not wait([client.sentinel], HEARTBEAT_SECONDS):
            socket.send(message)
    except zmq.ZMQError:
        return  # the context was destroyed
    shutil.rmtree(folder, ignore_errors=True)  # the client cannot remove it any more
    time.sleep(PATIENCE_SECONDS)
    os._exit(1)  # the main thread still loads the model, or it is stuck


def _serve(core: EngineCore, inbox: "zmq.Socket[bytes]", report: Callable[[CoreReport], None]) -> None:
    """Carry out orders and run steps, until the client shuts the core down or ends."""
    client = parent_process()
    assert client is not None
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(client.sentinel, zmq.POLLIN)
    gates = None if core.wake_up is None else core.wake_up.fileno()
    if gates is not None:
        poller.register(gates, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(0 if core.has_work else None))
        if client.sentinel in ready:
            return
        while inbox.poll(0):
            order = _orders.decode(inbox.recv())
            if isinstance(order, messages.Shutdown):
                return
            refused = _obey(core, order)
            if refused or not core.has_unfinished:
                report(messages.StepOutputs(refused, core.stats))
        if core.has_work or gates in ready:
            outputs = core.step()
            report(messages.StepOutputs(outputs, core.stats))


def _obey(core: EngineCore, order: messages.CoreOrder) -> list[EngineCoreOutput]:
    """Carry out an order. Returns the final outputs of requests that cannot run."""
    if isinstance(order, messages.AddRequests):
        refused = []
        for request in order.requests:
            try:
                core.add_request(request)
            except ValueError as error:
                refused.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error_text(error)))
        return refused
    if isinstance(order, messages.AbortRequests):
        core.abort_requests(order.request_ids)
    else:
        core.reset_prefix_cache()
    return []
