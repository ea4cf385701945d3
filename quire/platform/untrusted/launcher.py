"""The launcher process: imports the modules of jobs, and forks a process for each job.

It has one thread, and reads orders from a socket to the pool (SOCK_SEQPACKET, a message each):

    ["prepare", key, function] + socket    run a function on the arguments from the socket, store its result ["run", id,
    function, key, limits] + socket    fork a job, which reads its arguments from the socket and replies ["signal", id,
    number]                 send a signal to a job ["nice", id, number]                   lower a job's priority, below
    the launcher's

and reports ["started", id, pid], ["ended", id, wait status] and ["failed", id or key, text]. It exits with its parent.
"""

import ctypes
import gc
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from quire.messages.errors import error_text
from quire.platform.untrusted.confinement import confine, end_with_parent
from quire.platform.untrusted.limits import Limits

HEADER = struct.Struct("=Q")  # the number of bytes that follow
PACKET = 65_536  # bytes of an order or a report at most
_TEXT = 2_000  # characters of an error


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def main(descriptor: int, parent: int) -> None:
    end_with_parent(parent)
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    _Launcher(control).serve()


class _Launcher:
    def __init__(self, control: socket.socket) -> None:
        self._control, self._selector = control, selectors.DefaultSelector()
        self._prepared: dict[str, Any] = {}
        self._failures: dict[str, str] = {}  # of preparations
        self._jobs: dict[int, int] = {}  # id → pid
        self._ids: dict[int, int] = {}
        # The wake-up requires a signal handler; children are reaped in the loop.
        self._wake, wakes = socket.socketpair()
        for end in (self._wake, wakes):
            end.setblocking(False)
        self._wakes = wakes
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        selector = self._selector
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                    continue
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._control, PACKET, 1)
                except ConnectionResetError:  # it had not read all reports
                    return
                if not data:
                    return  # the pool has closed its end; the kernel kills the jobs with this process
                name, *fields = msgspec.msgpack.decode(data)
                link = socket.socket(fileno=descriptors[0]) if descriptors else None
                getattr(self, f"_{name}")(*fields, link)

    def _report(self, *report: Any) -> None:
        self._control.send(msgspec.msgpack.encode(report))

    def _prepare(self, key: str, function: str, link: socket.socket) -> None:
        with link:
            try:
                self._prepared[key] = resolve(function)(*msgspec.msgpack.decode(receive(link)))
            except Exception as error:
                self._failures[key] = error_text(error)[:_TEXT]
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc does not return freed memory
            trim(0)
        self._report("prepared", key)

    def _run(self, identity: int, function: str, key: str, limits: dict[str, Any], link: socket.socket) -> None:
        with link:
            try:
                if key in self._failures:
                    raise RuntimeError(self._failures[key])
                call = resolve(function)
                prepared = [self._prepared[key]] if key else []
                gc.freeze()  # so that a job's collections do not touch the shared pages
                launcher = os.getpid()
                pid = os.fork()
            except Exception as error:
                self._report("failed", identity, error_text(error)[:_TEXT])
                return
            if not pid:
                self._become_job(launcher, call, prepared, Limits(**limits), link)
        self._jobs[identity], self._ids[pid] = pid, identity
        self._report("started", identity, pid)

    def _signal(self, identity: int, number: int, _: None) -> None:
        if identity in self._jobs:  # its process is at least a zombie, so its pid has not been reused
            os.kill(self._jobs[identity], number)

    def _nice(self, identity: int, number: int, _: None) -> None:
        if identity in self._jobs:
            number += os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._jobs[identity], min(number, 19))

    def _reap(self) -> None:
        while self._ids:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            identity = self._ids.pop(pid)
            del self._jobs[identity]
            self._report("ended", identity, status, usage.ru_utime + usage.ru_stime)

    def _become_job(
        self, launcher: int, call: Callable[..., Any], prepared: list[Any], limits: Limits, link: socket.socket
    ) -> None:
        """In the new process: run the job, and exit."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._selector, self._control, self._wake, self._wakes):
                end.close()
            os.dup2(1, 2)  # to /dev/null: libraries' output about client data would fill the server's log
            end_with_parent(launcher)
            confine(limits)
            send(link, _answer(call, prepared, receive(link)))
        finally:
            os._exit(0)


def _answer(call: Callable[..., Any], prepared: list[Any], data: bytearray) -> bytes:
    """Return the encoded reply of a job: ["result", value], ["refused", text], ["memory"] or ["failed", text,
    traceback]."""
    try:
        try:
            return msgspec.msgpack.encode(("result", call(*prepared, *msgspec.msgpack.decode(data))))
        except ValueError as error:
            return msgspec.msgpack.encode(("refused", error_text(error)[:_TEXT]))
        except MemoryError:
            raise
        except BaseException as error:  # a library's panic is not an Exception
            text = error_text(error)[:_TEXT]
            return msgspec.msgpack.encode(("failed", text, traceback.format_exc()[-8_000:]))
    except MemoryError:
        return msgspec.msgpack.encode(("memory",))


def receive(link: socket.socket) -> bytearray:
    """Receive the bytes that the peer sent with `send`. Raises EOFError if it has disconnected."""
    (size,) = HEADER.unpack(_receive(link, HEADER.size))
    return _receive(link, size)


def _receive(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = link.recv_into(view[done:])
        if not count:
            raise EOFError("the pool has closed the socket")
        done += count
    return data


def send(link: socket.socket, data: bytes) -> None:
    link.sendall(HEADER.pack(len(data)))
    link.sendall(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
