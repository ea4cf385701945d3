"""The executor of several ranks. Each is a process that has its part of the model and executes every step: some of the
layers (pipeline parallelism), of each layer a share (tensor parallelism), and of each step some tokens (context
parallelism)."""

import contextlib
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch

from quire.config import EngineConfig
from quire.executor import messages
from quire.executor.base import Executor
from quire.executor.link import Link
from quire.messages.engine import Meeting
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.metrics.logging import logging_level
from quire.parallel.mesh import open_meeting
from quire.parallel.sizes import MeshSizes

HOST = "127.0.0.1"  # the ranks run on this machine
RANK_PROGRAM = ("-m", "quire.executor.rank")
SILENCE_SECONDS = 5.0  # a rank counts as stopped after so long without a heartbeat
SILENT_START_SECONDS = 60.0  # the same until a rank is ready: on a busy machine, imports block its threads for long
_END_SECONDS = 2.0  # time for ranks to end by themselves
_replies = msgspec.msgpack.Decoder(messages.Reply)


class MultiprocExecutor(Executor):
    """Starts a process for each rank, and sends each of them every step. The ranks of the last stage sample; what they
    sampled goes to the other stages before the result is known here, so before any later step that needs it.

    If a rank fails, ends or falls silent, the executor is broken: all pending and later results raise a RuntimeError
    that names the rank.
    """

    def __init__(
        self, config: EngineConfig, directory: Path, max_model_len: int, meeting: Meeting | None = None
    ) -> None:
        """meeting: where the replicas meet that share experts, None for a replica that shares none. Raises ValueError
        if the options do not fit the model, RuntimeError if a rank fails otherwise."""
        sizes, store = MeshSizes.of(config.parallel), None
        if meeting is None:
            store = open_meeting(HOST)  # it ends with this function, when the ranks have met
            meeting = Meeting(HOST, store.port)
        start = messages.Start(
            config, str(directory), max_model_len, sizes, meeting,
            max(1, torch.get_num_threads() // sizes.replica), logging_level(),
        )  # fmt: skip
        self._ranks = _Ranks(sizes)
        self._end = weakref.finalize(self, self._ranks.end)  # also runs when the executor is garbage-collected
        try:
            self._ranks.start(start)
            *_, last = [ready.result() for ready in self._ranks.ready]
            self.kv_cache, self.step_costs = last.kv_cache, last.step_costs
        except BaseException:
            self.shutdown()
            raise

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

    def shutdown(self) -> None:
        self._end()


class _Ranks:
    """The processes, and the threads that exchange messages with them: one sends, and one for each rank receives.

    Ctrl-C interrupts only the main thread, so no message is ever cut off, or sent to some of the ranks only.
    """

    def __init__(self, sizes: MeshSizes) -> None:
        ranks = range(sizes.replica)
        others = len(ranks) // sizes.pp * (sizes.pp - 1)
        self.last_stage, self._other_stages = ranks[others:], ranks[:others]
        self.ready: list[Future[messages.Ready]] = [Future() for _ in ranks]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, Link] = {}  # by rank
        self._orders: queue.SimpleQueue[tuple[bytes, range] | None] = queue.SimpleQueue()
        self._results: dict[int, Future[ModelRunnerOutput]] = {}  # by step
        # Adapters by key, with the ranks' replies.
        self._loading: dict[str, tuple[Future[None], list[messages.AdapterLoaded]]] = {}
        self._problem: Exception | None = None
        self._lock = threading.Lock()  # guards the results and the problem

    def start(self, start: messages.Start) -> None:
        """Start the processes, and wait until they have connected. Raises RuntimeError if one does not."""
        key, first = secrets.token_bytes(32), messages.encode(start)
        # All ranks log the same, so only rank 0 does.
        quiet = messages.encode(msgspec.structs.replace(start, log_level="ERROR"))
        with socket.create_server((HOST, 0)) as listener:
            for rank in range(len(self.ready)):
                self._processes.append(_start_process(rank, listener.getsockname()[1], key))
            threading.Thread(target=self._send, name="orders", daemon=True).start()
            listener.settimeout(0.2)
            deadline = time.monotonic() + SILENT_START_SECONDS
            while len(self._links) < len(self.ready):
                self._check_start(deadline)
                with contextlib.suppress(OSError, msgspec.DecodeError):  # a timeout, or a peer that is not a rank
                    link = Link(listener.accept()[0], key, b"executor")
                    rank = msgspec.msgpack.decode(link.receive(), type=messages.Hello).rank
                    link.expect_within(SILENT_START_SECONDS)
                    link.send(quiet if rank else first)
                    self._links[rank] = link
                    threading.Thread(target=self._listen, args=(rank, link), name=f"rank {rank}", daemon=True).start()

    def order(self, order: messages.Order, ranks: range | None = None) -> None:
        """Send an order to the given ranks, or to all."""
        self._orders.put((messages.encode(order), range(len(self.ready)) if ranks is None else ranks))

    def expect(self, step_id: int) -> Future[ModelRunnerOutput]:
        result: Future[ModelRunnerOutput] = Future()
        with self._lock:
            if self._problem is None:
                self._results[step_id] = result
            else:
                result.set_exception(self._problem)
        return result

    def load(self, order: messages.LoadAdapter) -> Future[None]:
        loaded: Future[None] = Future()
        self._loading[order.key] = loaded, []
        self.order(order)
        return loaded

    def _note_loaded(self, reply: messages.AdapterLoaded) -> None:
        with self._lock:
            loaded, replies = self._loading[reply.key]
            replies.append(reply)
            if len(replies) < len(self.ready):
                return
            del self._loading[reply.key]
        problem = next((reply.problem for reply in replies if reply.problem is not None), None)
        if problem is None:
            loaded.set_result(None)
        else:
            loaded.set_exception(ValueError(problem))

    def end(self) -> None:
        """Close the connections, which makes the ranks end. Kill those that do not end in time."""
        deadline = time.monotonic() + (_END_SECONDS if self._problem is None else 0.2)
        self._orders.put(None)
        for link in self._links.values():
            link.close()
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _check_start(self, deadline: float) -> None:
        for rank, process in enumerate(self._processes):
            if rank in self._links:
                continue
            if process.poll() is not None:
                raise RuntimeError(f"the process of rank {rank} ended unexpectedly (exit code {process.returncode})")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the process of rank {rank} has not connected for {SILENT_START_SECONDS:.0f} s")

    def _send(self) -> None:
        """Send orders to all ranks, and heartbeats while there are no orders."""
        beat = messages.encode(messages.Heartbeat()), range(len(self.ready))
        while True:
            try:
                order = self._orders.get(timeout=messages.BEAT_SECONDS)
            except queue.Empty:
                order = beat
            if order is None:
                return
            message, ranks = order
            for rank, link in list(self._links.items()):
                if rank in ranks:
                    with contextlib.suppress(OSError):  # the rank has gone, which the thread in _listen reports
                        link.send(message)

    def _listen(self, rank: int, link: Link) -> None:
        """Receive the messages of a rank until it has gone."""
        silence = SILENT_START_SECONDS
        try:
            while True:
                reply = _replies.decode(link.receive())
                if isinstance(reply, messages.Result):
                    if self._other_stages:
                        taken = messages.Take(reply.output.step_id, reply.output.sampled_token_ids)
                        self.order(taken, self._other_stages)
                    self._take(reply.output)
                elif isinstance(reply, messages.AdapterLoaded):
                    self._note_loaded(reply)
                elif isinstance(reply, messages.Ready):
                    silence = SILENCE_SECONDS
                    link.expect_within(silence)
                    with self._lock:
                        if self._problem is None:
                            self.ready[rank].set_result(reply)
                elif isinstance(reply, messages.Broken):
                    time.sleep(0.2)  # if it failed because another rank ended, report the other rank first
                    self._fail(
                        ValueError(reply.reason)
                        if reply.by_user
                        else RuntimeError(f"rank {rank} failed: {reply.reason}")
                    )
                    return
        except BlockingIOError:
            self._fail(RuntimeError(f"rank {rank} has been silent for {silence:.0f} s"))
        except OSError:
            self._fail(RuntimeError(f"the process of rank {rank} ended unexpectedly"))

    def _take(self, output: ModelRunnerOutput) -> None:
        with self._lock:
            result = self._results.pop(output.step_id, None)
            if result is not None:  # None if `expect` did not keep it: Ctrl-C came, or the executor had failed
                result.set_result(output)

    def _fail(self, problem: Exception) -> None:
        """Make all pending and later results raise `problem`. Only the first problem counts."""
        with self._lock:
            if self._problem is None:
                self._problem = problem
                for ready in self.ready:
                    if not ready.done():
                        ready.set_exception(problem)
                for result in self._results.values():
                    result.set_exception(problem)


def _start_process(rank: int, port: int, key: bytes) -> "subprocess.Popen[bytes]":
    """Start the process of a rank. It finds the same modules as this process, and uses the loopback device."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", *RANK_PROGRAM, HOST, str(port), str(rank)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(key.hex().encode() + b"\n")
    return process
