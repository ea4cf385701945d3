"""A process per rank on this machine, each with its share of every layer (tensor parallelism).

Steps travel as msgpack over pipes; every rank executes every step, rank 0 answers.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kvcache.specs import KVCacheSize
from quire.messages.engine import RequestError
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.parallel.mesh import join
from quire.worker.worker import Worker


class Ready(msgspec.Struct, tag=True):
    """The rank has loaded its share."""

    kv_cache: KVCacheSize


class Launched(msgspec.Struct, tag=True):
    """The step passed its checks and its forward is being computed."""


class Refused(msgspec.Struct, tag=True):
    """One request of the step cannot be run; nothing was launched."""

    request_id: str
    reason: str


class Sampled(msgspec.Struct, tag=True):
    output: ModelRunnerOutput


class Broken(msgspec.Struct, tag=True):
    """The rank failed and has ended."""

    reason: str


class Sample(msgspec.Struct, tag=True):
    step_id: int


class Submit(msgspec.Struct, tag=True):
    step: SchedulerOutput


_replies = msgspec.msgpack.Decoder(Ready | Launched | Refused | Sampled | Broken)
_orders = msgspec.msgpack.Decoder(Submit | Sample)


class MultiprocExecutor(Executor):
    """Starts `tensor_parallel_size` processes that meet over Gloo, and sends each of them every step."""

    def __init__(self, config: EngineConfig, directory: Path, max_model_len: int) -> None:
        context = multiprocessing.get_context("spawn")
        size = config.parallel.tensor_parallel_size
        self._meeting = tempfile.NamedTemporaryFile(prefix="quire-ranks-", delete=False)
        self._pipes: list[Connection] = []
        self._processes = []
        os.unlink(self._meeting.name)  # Gloo makes the file itself
        threads = max(1, torch.get_num_threads() // size)
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(theirs, rank, size, f"file://{self._meeting.name}", threads, config, directory, max_model_len),
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
        assert isinstance(ready[0], Ready)
        self.kv_cache = ready[0].kv_cache

    def submit(self, step: SchedulerOutput) -> None:
        self._send(Submit(step))
        replies = [self._receive(rank) for rank in range(len(self._pipes))]  # the checks are the same on every rank
        if isinstance(replies[0], Refused):
            raise RequestError(replies[0].request_id, replies[0].reason)

    def sample(self, step_id: int) -> Future[ModelRunnerOutput]:
        self._send(Sample(step_id))
        future: Future[ModelRunnerOutput] = Future()
        reply = self._receive(0)
        assert isinstance(reply, Sampled)
        future.set_result(reply.output)
        return future

    def shutdown(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the ranks end when their pipe does
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()

    def _send(self, order: Submit | Sample) -> None:
        message = msgspec.msgpack.encode(order)
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def _receive(self, rank: int) -> Ready | Launched | Refused | Sampled:
        try:
            reply: Ready | Launched | Refused | Sampled | Broken = _replies.decode(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the process of rank {rank} ended unexpectedly") from error
        if isinstance(reply, Broken):
            raise RuntimeError(f"rank {rank} failed: {reply.reason}")
        return reply


def _run_rank(
    pipe: Connection,
    rank: int,
    size: int,
    meeting: str,
    threads: int,
    config: EngineConfig,
    directory: Path,
    max_model_len: int,
) -> None:
    """The life of one rank."""
    torch.set_num_threads(threads)

    def reply(message: Ready | Launched | Refused | Sampled | Broken) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    try:
        worker = Worker(config, directory, max_model_len, join(rank, size, meeting))
        reply(Ready(worker.kv_cache))
        while True:
            order = _orders.decode(pipe.recv_bytes())
            if isinstance(order, Sample):
                output = worker.runner.sample(order.step_id)
                if rank == 0:
                    reply(Sampled(output))
                continue
            try:
                worker.runner.submit(order.step)
            except RequestError as error:
                reply(Refused(error.request_id, error.reason))
            else:
                reply(Launched())
    except (EOFError, KeyboardInterrupt, ConnectionError):
        return  # the executor has gone
    except Exception as error:
        reply(Broken(f"{type(error).__name__}: {error}"))
        raise
