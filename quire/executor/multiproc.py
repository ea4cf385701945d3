"""A process per rank on this machine, each with its share of every layer (tensor parallelism).

Steps travel as msgpack over pipes; every rank executes every step, rank 0 answers.
"""

import contextlib
import multiprocessing
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kvcache.specs import KVCacheSize
from quire.messages.errors import error_text
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.metrics.logging import configure_logging, logging_level
from quire.parallel.mesh import MeshSizes, join, open_meeting
from quire.worker.worker import Worker


class Reply(msgspec.Struct, omit_defaults=True):
    """Of a rank: to its start, to a step, to a sampling; without any field it is "launched"."""

    kv_cache: KVCacheSize | None = None
    output: ModelRunnerOutput | None = None
    broken: str | None = None  # the rank failed and has ended


Model = tuple[EngineConfig, Path, int]  # what a Worker is made from, and its max_model_len
_replies = msgspec.msgpack.Decoder(Reply)
_orders = msgspec.msgpack.Decoder(SchedulerOutput | int)  # a step to launch, or the id of one to sample


class MultiprocExecutor(Executor):
    """Starts `tensor_parallel_size` processes that meet over Gloo, and sends each of them every step."""

    def __init__(self, config: EngineConfig, directory: Path, max_model_len: int) -> None:
        context = multiprocessing.get_context("spawn")
        size = config.parallel.tensor_parallel_size
        self._store = open_meeting("127.0.0.1")  # where the ranks meet
        self._pipes: list[Connection] = []
        self._processes = []
        threads, model = max(1, torch.get_num_threads() // size), (config, directory, max_model_len)
        for rank in range(size):
            ours, theirs = context.Pipe()
            level = logging_level() if rank == 0 else "ERROR"  # what all ranks find out is logged once
            process = context.Process(
                target=_run_rank,
                args=(theirs, rank, size, self._store.port, threads, model, level),
                name=f"quire-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            ready = [self._receive(rank) for rank in range(size)]
        except BaseException:
            self.shutdown()
            raise
        assert ready[0].kv_cache is not None
        self.kv_cache = ready[0].kv_cache

    def submit(self, step: SchedulerOutput) -> None:
        self._send(step)
        for rank in range(len(self._pipes)):
            self._receive(rank)

    def sample(self, step_id: int) -> Future[ModelRunnerOutput]:
        self._send(step_id)
        future: Future[ModelRunnerOutput] = Future()
        output = self._receive(0).output
        assert output is not None
        future.set_result(output)
        return future

    def shutdown(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the ranks end when their pipe does
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()

    def _send(self, order: SchedulerOutput | int) -> None:
        message = msgspec.msgpack.encode(order)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except ConnectionError as error:
                raise RuntimeError(f"the process of rank {rank} ended unexpectedly") from error

    def _receive(self, rank: int) -> Reply:
        try:
            reply: Reply = _replies.decode(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the process of rank {rank} ended unexpectedly") from error
        if reply.broken is not None:
            raise RuntimeError(f"rank {rank} failed: {reply.broken}")
        return reply


def _run_rank(pipe: Connection, rank: int, size: int, meeting: int, threads: int, model: Model, level: str) -> None:
    """The life of one rank. meeting: the port at which the ranks meet. level: of its log."""
    configure_logging(level)
    torch.set_num_threads(threads)

    def reply(message: Reply) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    try:
        worker = Worker(*model, join(MeshSizes(tp=size), rank, "127.0.0.1", meeting))
        reply(Reply(kv_cache=worker.kv_cache))
        while True:
            order = _orders.decode(pipe.recv_bytes())
            if isinstance(order, int):
                output = worker.runner.sample(order)()
                if rank == 0:
                    reply(Reply(output=output))
                continue
            worker.runner.submit(order)
            reply(Reply())
    except (EOFError, KeyboardInterrupt, ConnectionError):
        return  # the executor has gone
    except Exception as error:
        with contextlib.suppress(OSError):  # the executor may have given up because of another rank
            reply(Reply(broken=error_text(error)))
        if not isinstance(error, ValueError):  # those say all in their message
            raise
