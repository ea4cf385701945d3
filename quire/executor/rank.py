"""The program of one rank: `python -m quire.executor.rank HOST PORT RANK` connects to the executor at HOST:PORT.

The key of the connection, and the cluster's secret if ranks of several machines meet, are read from standard input so
that process lists do not show them. Everything else comes from the executor, or from the agent of this machine. A rank
ends when its executor disconnects or is silent, even in the middle of its work.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.executor import messages
from quire.executor.link import Link
from quire.messages.changes import PROFILE_SECONDS, Change, Profile, TrainerOrder
from quire.messages.errors import error_text
from quire.messages.transfers import Transfer
from quire.observability.logging import configure_logging
from quire.platform.garbage import skip_last_collection
from quire.platform.stacks import FOLDER_VARIABLE, offer_stacks
from quire.platform.torch_import import quick_imports
from quire.platform.untrusted.limits import BusyError, WorkerError

if TYPE_CHECKING:
    from quire.parallel.mesh import Mesh
    from quire.worker.worker import Worker

SILENCE_SECONDS = 10.0  # the rank ends after this time without a message from the executor
_orders = msgspec.msgpack.Decoder(messages.Order)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal; the executor ends the ranks if needed
        signal.signal(number, signal.SIG_IGN)
    host = sys.argv[1]
    port = int(sys.argv[2])
    rank = int(sys.argv[3])
    key = bytes.fromhex(sys.stdin.readline())
    secret = bytes.fromhex(sys.stdin.readline())
    link = Link.connect(host, port, key)
    link.send(messages.encode(messages.Hello(rank)))
    start = _orders.decode(link.receive())
    assert isinstance(start, messages.Start)
    link.expect_within(SILENCE_SECONDS)
    configure_logging(*start.log)
    if folder := os.environ.get(FOLDER_VARIABLE):
        offer_stacks(Path(folder), f"rank {rank}")
    current_process().name = f"rank {rank}"  # in the log
    threading.Thread(target=_beat, args=(link,), name="heartbeat", daemon=True).start()
    try:
        _work(link, start, rank, secret)
    except Exception as error:
        if link.is_closed():  # the executor ended: another rank that this step needed has failed
            return
        by_user = isinstance(error, (ValueError, TypeError, OSError))
        with contextlib.suppress(OSError):
            link.send(messages.encode(messages.Broken(error_text(error), by_user)))
        if not by_user:
            raise
    finally:
        skip_last_collection()


def _work(link: Link, start: messages.Start, rank: int, secret: bytes) -> None:
    """Load the model and execute steps until the executor disconnects."""
    with quick_imports():  # late, since they take seconds; heartbeats are already being sent
        import torch

        from quire.worker.stage_runner import StageRunner
        from quire.worker.worker import Worker

    torch.set_num_threads(start.num_threads)
    mesh = _join(start, rank, secret)
    reports = mesh.tp.rank == mesh.cp.rank == 0 and mesh.pp.rank == mesh.pp.size - 1
    worker = Worker(start.config, Path(start.directory), start.max_model_len, mesh)
    link.send(messages.encode(messages.Ready(worker.kv_cache, worker.step_costs)))
    while True:
        try:
            order = _orders.decode(link.receive())
        except OSError:
            return
        if isinstance(order, messages.Submit):
            worker.runner.submit(order.step)
        elif isinstance(order, messages.Sample):
            output = worker.runner.sample(order.step_id, order.masks)()
            if reports:
                link.send(messages.encode(messages.Result(output)))
        elif isinstance(order, messages.Take):
            assert isinstance(worker.runner, StageRunner)
            worker.runner.take(order.step_id, order.sampled_token_ids)
        else:
            _obey(link, worker, order)


def _join(start: messages.Start, rank: int, secret: bytes) -> "Mesh":
    """Meet the other ranks."""
    from quire.models.precision import resolve_dtype
    from quire.ops.cpu.shared_sums import with_shared_sums
    from quire.parallel.mesh import connect_store, join
    from quire.parallel.symmetric_sums import with_symmetric_sums
    from quire.worker.device import on_gpu

    kind = "cuda" if on_gpu(start.config.kernels.device) else "cpu"
    first = start.replica * start.sizes.replica  # this replica's first rank in the mesh
    machine = frozenset(first + other for other, of in enumerate(start.machines) if of == start.machines[rank])
    start_of_neighbours, count = start.neighbours
    neighbours = range(first + start_of_neighbours, first + start_of_neighbours + count)
    store = None if start.sizes.world == 1 else connect_store(start.meeting, secret, start.generation)
    mesh = join(start.sizes, first + rank, "", 0, kind, store, neighbours, machine)
    if not machine.issuperset(next(group for group in start.sizes.groups("tp") if first + rank in group)):
        return mesh
    if kind == "cpu":
        return replace(mesh, tp=with_shared_sums(mesh.tp))
    options = start.config.parallel
    # torch's symmetric memory is of one kind in a process, and that of the exchange is NVSHMEM's. The halves of a step
    # add up on two streams, but there is one buffer.
    uses_nccl = options.all2all_backend == "symmetric_memory" or options.enable_dbo
    if options.disable_custom_all_reduce or uses_nccl:
        return mesh
    return replace(mesh, tp=with_symmetric_sums(mesh.tp, mesh.device(kind), resolve_dtype(start.config.model)))


def _obey(link: Link, worker: "Worker", order: messages.Order) -> None:
    """Carry out an order that is not part of a step."""
    if isinstance(order, Change):
        if isinstance(order, Profile):  # heartbeats may stop while a trace is written, here and in the core
            link.send(messages.encode(messages.Busy()))
            link.expect_within(PROFILE_SECONDS if order.step == "start" else SILENCE_SECONDS)
        link.send(messages.encode(messages.Changed(_change(worker, order))))
    elif isinstance(order, messages.LoadAdapter):
        _begin(link, order.key, partial(worker.runner.adapters.load, order.key, order.path))
    elif isinstance(order, TrainerOrder):
        _begin(link, order.key, partial(worker.resident_memory.exchange, order))
    elif isinstance(order, Transfer):
        assert worker.transfers is not None
        worker.transfers.submit(order).add_done_callback(partial(_report_transfer, link, order.number))
    elif isinstance(order, messages.DropAdapter):
        worker.runner.adapters.drop(order.key)


def _change(worker: "Worker", change: Change) -> str | None:
    """Carry out a change. Returns the error message if it fails."""
    try:
        worker.change(change)
    except (ValueError, OSError) as error:
        return error_text(error)
    return None


def _begin(link: Link, key: str, work: Callable[[], None]) -> None:
    """Carry out a keyed order on another thread, and report the result to the executor."""

    def run() -> None:
        loaded = messages.Loaded(key)
        try:
            work()
        except Exception as error:
            loaded = messages.Loaded(key, error_text(error), isinstance(error, BusyError | WorkerError))
        with contextlib.suppress(OSError):
            link.send(messages.encode(loaded))

    threading.Thread(target=run, daemon=True).start()


def _report_transfer(link: Link, number: int, transfer: Future[list[int]]) -> None:
    with contextlib.suppress(OSError):
        link.send(messages.encode(messages.Transferred(number, transfer.result())))


def _beat(link: Link) -> None:
    """Send heartbeats to the executor. End this process when the executor disconnects."""
    beat = messages.encode(messages.Heartbeat())
    with contextlib.suppress(OSError):
        while True:
            link.send(beat)
            time.sleep(messages.BEAT_SECONDS)
    time.sleep(messages.BEAT_SECONDS)  # lets the main thread end the process itself, if it was waiting for orders
    os._exit(1)


if __name__ == "__main__":
    main()
