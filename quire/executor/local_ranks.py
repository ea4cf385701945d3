"""Ranks on this machine: their processes, and the connections to them."""

import contextlib
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quire.executor import messages
from quire.executor.link import Link
from quire.executor.ranks import Observer, Ranks
from quire.messages.changes import PROFILE_SECONDS
from quire.observability.logging import logger
from quire.platform.stacks import FOLDER_VARIABLE, collect_stacks

HOST = "127.0.0.1"  # where the executor, or the agent of this machine, listens for its ranks
RANK_PROGRAM = ("-m", "quire.executor.rank")
SILENCE_SECONDS = 5.0  # a rank counts as stopped after this time without a heartbeat
SILENT_START_SECONDS = 60.0  # the same until a rank is ready: on a busy machine, imports block its threads for long
END_SECONDS = (2.0, 0.2)  # time for ranks to end by themselves: normally, and after the executor has failed
_replies = msgspec.msgpack.Decoder(messages.Reply)


class LocalRanks(Ranks):
    """Starts a process for each rank. One thread sends orders to all of them, and one thread per rank receives its
    replies.

    Ctrl-C interrupts only the main thread, so no message is ever cut off or sent to only some of the ranks.
    """

    def __init__(self, numbers: range, observer: Observer) -> None:
        self.numbers = numbers
        self._observer = observer
        self.processes: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, Link] = {}  # by rank
        self._orders: queue.SimpleQueue[tuple[bytes, range] | None] = queue.SimpleQueue()
        self._is_ending = False

    def start(self, start: messages.Start, secret: bytes = b"", environment: Mapping[str, str] = {}) -> None:
        """Start the processes, and wait until they have connected. Raises RuntimeError if one does not connect.

        secret: of the cluster, if the ranks meet at its head. environment: variables for the processes.
        """
        key = secrets.token_bytes(32)
        first = messages.encode(start)
        # All ranks would log the same, so only rank 0 logs.
        quiet = messages.encode(msgspec.structs.replace(start, log=start.log._replace(level="ERROR")))
        with socket.create_server((HOST, 0)) as listener:
            for rank in self.numbers:
                self.processes.append(_start_process(rank, listener.getsockname()[1], [key, secret], environment))
            threading.Thread(target=self._send, name="orders", daemon=True).start()
            listener.settimeout(0.2)
            deadline = time.monotonic() + SILENT_START_SECONDS
            while len(self._links) < len(self.numbers):
                self._check_start(deadline)
                with contextlib.suppress(OSError, msgspec.DecodeError):  # a timeout, or a peer that is not a rank
                    link = Link(listener.accept()[0], key, b"executor")
                    rank = msgspec.msgpack.decode(link.receive(), type=messages.Hello).rank
                    link.expect_within(SILENT_START_SECONDS)
                    link.send(quiet if rank else first)
                    self._links[rank] = link
                    threading.Thread(target=self._listen, args=(rank, link), name=f"rank {rank}", daemon=True).start()

    def order(self, order: bytes, ranks: range) -> None:
        self._orders.put((order, ranks))

    def end(self, patience: float) -> None:
        """Close the connections, which makes the ranks end. Kill those that do not end in time."""
        self._is_ending = True
        deadline = time.monotonic() + patience
        self._orders.put(None)
        for link in list(self._links.values()):
            link.close()
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _check_start(self, deadline: float) -> None:
        if self._is_ending:
            raise RuntimeError("the ranks were told to end")
        for rank, process in zip(self.numbers, self.processes, strict=True):
            if rank in self._links:
                continue
            if process.poll() is not None:
                raise RuntimeError(f"the process of rank {rank} ended unexpectedly (exit code {process.returncode})")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the process of rank {rank} has not connected for {SILENT_START_SECONDS:.0f} s")

    def _send(self) -> None:
        """Send orders to the ranks, and heartbeats while there are no orders."""
        beat = messages.encode(messages.Heartbeat()), self.numbers
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
                    with contextlib.suppress(OSError):  # the rank has disconnected, which the thread in _listen reports
                        link.send(message)

    def _listen(self, rank: int, link: Link) -> None:
        """Receive the messages of a rank until it disconnects."""
        silence = SILENT_START_SECONDS
        try:
            while True:
                reply = _replies.decode(link.receive())
                if isinstance(reply, messages.Broken):
                    time.sleep(0.2)  # if it failed because another rank ended, report the other rank first
                    self._observer.failed(
                        ValueError(reply.reason)
                        if reply.by_user
                        else RuntimeError(f"rank {rank} failed: {reply.reason}")
                    )
                    return
                if isinstance(reply, messages.Ready | messages.Busy | messages.Changed):
                    silence = PROFILE_SECONDS if isinstance(reply, messages.Busy) else SILENCE_SECONDS
                    link.expect_within(silence)
                if not isinstance(reply, messages.Heartbeat | messages.Busy):
                    self._observer.replied(rank, reply)
        except BlockingIOError:
            self._log_stacks(rank)
            self._observer.failed(RuntimeError(f"rank {rank} has been silent for {silence:.0f} s"))
        except OSError:
            self._observer.failed(RuntimeError(f"the process of rank {rank} ended unexpectedly"))

    def _log_stacks(self, rank: int) -> None:
        """Log the stacks of a silent rank, if it can still report them."""
        folder = os.environ.get(FOLDER_VARIABLE)
        process = self.processes[self.numbers.index(rank)]
        for name, stacks in () if folder is None else collect_stacks(Path(folder), process.pid).items():
            logger.error("The threads of %s, which is silent:\n%s", name, stacks)


def _start_process(
    rank: int, port: int, keys: list[bytes], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start the process of a rank. It finds the same modules as this process."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    variables = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-P", *RANK_PROGRAM, HOST, str(port), str(rank)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables)
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write("".join(key.hex() + "\n" for key in keys).encode())
    return process
