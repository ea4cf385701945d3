"""The thread of a pool: hands jobs to the launcher, watches their limits, and shares the processors among them.

At most `slots` jobs run at a time. A job that has run for its slice while others wait is stopped (SIGSTOP), and resumes
when fewer wait, so a quick job never waits long for slow ones. At most `places` jobs have a process. If all are in use
and a new job has waited for a tenth of its time, the job that has used the most processor time is ended with a
BusyError, if it has exceeded its slice.

A job has the engine's priority for a slice of processor time, and a lower one after that: a quick job ends soon even on
a busy machine, and slow ones do not compete with the engine.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire.messages.errors import error_text
from quire.platform.untrusted.launcher import HEADER, PACKET
from quire.platform.untrusted.limits import MIB, BusyError, LimitExceededError, Limits, WorkerError

logger = logging.getLogger("quire")

_LOOK_SECONDS = 0.05  # interval of checking the processor time of jobs
_NICE = 5  # of slow jobs: below the engine's threads, if they need all processors
_SILENCE_SECONDS = 5.0  # within which a launcher must report the end of a killed job
_PREPARATION_SECONDS = 300.0  # after which a preparation has failed
_CHUNK = 1 << 20  # bytes per read
_LAUNCHER = "quire.platform.untrusted.launcher"
_PACKAGES = str(Path(__file__).parents[3])  # the folder of quire and its sibling packages
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")  # and PYTHON*, no secrets


@dataclass(frozen=True)
class Preparation:
    """A value that a launcher computes once, from trusted data, for all jobs with the same key.

    function: "package.module:function"; a job's function receives its result as the first argument. arguments: creates
    the arguments when a launcher needs them. Its time is not charged to the jobs.
    """

    key: str
    function: str
    arguments: Callable[[], Sequence[Any]]


class Job:
    def __init__(
        self, identity: int, function: str, data: bytes, limits: Limits, preparation: Preparation | None
    ) -> None:
        self.identity = identity
        self.function = function
        self.limits = limits
        self.preparation = preparation
        self.to_send = memoryview(HEADER.pack(len(data)) + data)
        self.received = bytearray()
        self.size: int | None = None  # bytes of the reply
        self.future: Future[Any] = Future()
        self.submitted = time.monotonic()
        self.deadline = self.submitted + limits.total_seconds
        self.end_of_patience = self.submitted + limits.patience
        self.link: socket.socket | None = None
        self.pid = 0  # 0 before it has a process
        self.resumed = 0.0  # time at which it got its slot, or its process started
        self.failure: Exception | None = None  # why it was killed
        self.next_look = float("inf")  # time of the next check of its processor time, until it is treated as slow
        self.killed = 0.0  # time at which it was killed


class Jobs(Protocol):
    """The source of the thread's jobs: the pool."""

    slots: int
    places: int
    idle_seconds: float

    def take(self) -> list["Job"]:
        """Return the jobs that were submitted since the last call."""

    def retire(self, force: bool = False) -> bool:
        """Whether the thread may end because there are no new jobs. force: it ends in any case."""


class Service:
    """The work of a pool's thread while there are jobs. Only this thread uses the launcher."""

    def __init__(self, pool: Jobs, wake: socket.socket) -> None:
        self._pool = pool
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._prepared: dict[str, float | None] = {}  # key → start time of its preparation; None when it is done
        self._links: dict[socket.socket, memoryview] = {}  # of preparations, with the data left to send
        self._jobs: dict[int, Job] = {}  # those with a process
        self._waiting: deque[Job] = deque()
        self._next_deadline = float("inf")  # of the waiting jobs
        self._running: list[Job] = []  # in the slots
        self._stopped: deque[Job] = deque()

    def serve(self) -> None:
        pool = self._pool
        idle_since = time.monotonic()
        try:
            while True:
                for job in pool.take():
                    self._waiting.append(job)
                    self._next_deadline = min(self._next_deadline, job.deadline)
                now = time.monotonic()
                self._check_limits(now)
                self._look(now)
                self._share_slots(now)
                if self._waiting or self._jobs:
                    idle_since = now
                elif now >= idle_since + pool.idle_seconds and pool.retire():
                    return
                events = self._selector.select(self._pause(now, idle_since))
                self._handle(events)
                if not events and time.monotonic() > self._end_of_silence:  # all reports have been read
                    self._lose_launcher("does not respond")
        except BaseException as error:
            logger.exception("The pool of worker processes failed")
            pool.retire(force=True)
            for job in [*self._jobs.values(), *self._waiting, *pool.take()]:
                _fail(job, WorkerError(f"the pool of worker processes failed: {error_text(error)}"))
        finally:
            self._end_launcher()
            self._selector.close()
            self._wake.close()

    # ---- time

    def _pause(self, now: float, idle_since: float) -> float:
        """Return the seconds until the next scheduled work, if no event occurs before."""
        if not self._waiting and not self._jobs:
            return max(0.0, idle_since + self._pool.idle_seconds - now)
        times = [self._next_deadline, *(self._deadline(job) for job in self._jobs.values() if job.failure is None)]
        times += [job.next_look for job in self._running]
        times.append(self._end_of_silence)
        if self._waiting or self._stopped:
            times += [_slice_end(job) for job in self._running if _slice_end(job) > now]
        if self._waiting and len(self._jobs) >= self._pool.places:
            times.append(max(self._waiting[0].end_of_patience, now + _LOOK_SECONDS))
        return max(0.0, min([*times, now + 60.0]) - now) + 0.001

    def _check_limits(self, now: float) -> None:
        if now >= self._next_deadline:
            late = [job for job in self._waiting if now >= self._deadline(job)]
            self._waiting = deque(job for job in self._waiting if now < self._deadline(job))
            self._next_deadline = min(map(self._deadline, self._waiting), default=float("inf"))
            for job in late:
                _fail(job, BusyError(f"it waited for other requests for {job.limits.total_seconds:g} s, the limit"))
        for job in list(self._jobs.values()):
            if job.failure is None and job.future.cancelled():
                self._kill(job, BusyError("it was cancelled"))
            elif job.failure is None and now >= self._deadline(job):
                limit = f"{job.limits.total_seconds:g} s"
                self._kill(job, BusyError(f"it took more than {limit}, including the time it waited for others"))

    def _look(self, now: float) -> None:
        """Lower the priority of jobs that have used more processor time than usual ones need."""
        for job in self._running:
            if now >= job.next_look:
                left = job.limits.slice_seconds - _processor_seconds(job.pid)
                job.next_look = now + max(left, _LOOK_SECONDS) if left > 0 else float("inf")
                if left <= 0:
                    self._order("nice", job.identity, _NICE)

    def _deadline(self, job: Job) -> float:
        """Return the job's deadline, which is infinite during its preparation."""
        is_preparing = job.preparation is not None and self._prepared.get(job.preparation.key) is not None
        return float("inf") if is_preparing else job.deadline

    def _share_slots(self, now: float) -> None:
        slots = self._pool.slots
        places = self._pool.places
        for job in self._running[:]:
            may_others_run = bool(self._stopped) if not self._waiting else len(self._jobs) < places
            if may_others_run and now >= _slice_end(job):
                self._stop(job)
        if self._waiting and len(self._jobs) >= places and now >= self._waiting[0].end_of_patience:
            self._make_room()
        while len(self._running) < slots:
            if self._waiting and self._waiting[0].future.cancelled():
                self._waiting.popleft()
            elif self._waiting and len(self._jobs) < places:
                self._start(self._waiting.popleft())
            elif self._stopped:
                job = self._stopped.popleft()
                job.resumed = now
                self._running.append(job)
                self._order("signal", job.identity, int(signal.SIGCONT))
            else:
                break

    def _make_room(self) -> None:
        """End the job that has used the most processor time, if it is more than a usual job needs."""
        times = [(_processor_seconds(job.pid), job) for job in self._jobs.values() if job.failure is None]
        if len(times) < len(self._jobs):
            return  # one is already ending
        used, longest = max(times, key=lambda pair: pair[0])
        if used >= longest.limits.slice_seconds:
            reason = f"it had to make room for other requests after {used:.1f} s of processor time"
            self._kill(longest, BusyError(reason))

    def _stop(self, job: Job) -> None:
        self._running.remove(job)
        self._stopped.append(job)
        self._order("signal", job.identity, int(signal.SIGSTOP))

    def _kill(self, job: Job, failure: Exception) -> None:
        """Kill a job. It keeps its place until the launcher reports its end."""
        job.failure = failure
        job.killed = time.monotonic()
        self._order("signal", job.identity, int(signal.SIGKILL))
        self._leave_slot(job)
        _fail(job, failure)

    def _leave_slot(self, job: Job) -> None:
        for jobs in (self._running, self._stopped):
            if job in jobs:
                jobs.remove(job)

    # ---- the launcher

    def _start(self, job: Job) -> None:
        self._start_launcher()
        preparation = job.preparation
        if preparation is not None and preparation.key not in self._prepared:
            try:
                data = msgspec.msgpack.encode(tuple(preparation.arguments()))
            except Exception as error:
                _fail(job, error)
                return
            self._prepared[preparation.key] = time.monotonic()
            link = self._order_with_link("prepare", preparation.key, preparation.function)
            self._links[link] = memoryview(HEADER.pack(len(data)) + data)
            self._selector.register(link, selectors.EVENT_WRITE, link)
        fields = {name: getattr(job.limits, name) for name in Limits.__dataclass_fields__}
        key = "" if preparation is None else preparation.key
        self._jobs[job.identity] = job
        self._running.append(job)
        job.resumed = float("inf")
        job.link = self._order_with_link("run", job.identity, job.function, key, fields)
        self._selector.register(job.link, selectors.EVENT_READ | selectors.EVENT_WRITE, job)

    def _order_with_link(self, *order: Any) -> socket.socket:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        with theirs:
            self._order(*order, link=theirs)
        return mine

    def _order(self, *order: Any, link: socket.socket | None = None) -> None:
        assert self._control is not None
        with contextlib.suppress(OSError):  # it has ended, which the next read detects
            socket.send_fds(self._control, [msgspec.msgpack.encode(order)], [link.fileno()] if link else [])

    def _start_launcher(self) -> None:
        if self._launcher is not None:
            return
        if not sys.executable:
            raise WorkerError("worker processes need a Python interpreter, and sys.executable names none")
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)  # a stopped launcher reads nothing
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
        environment["PYTHONPATH"] = os.pathsep.join([_PACKAGES, *map(os.path.abspath, sys.path)])
        # A process that forks must have a single thread, and a job needs no more than one.
        threads = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
        environment |= dict.fromkeys(threads, "1") | {"MALLOC_ARENA_MAX": "1"}
        command = [
            sys.executable,
            "-P",
            "-S",  # all packages are already on the path, and editable installations would import a lot
            "-m",
            "quire.platform.untrusted.launcher",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        with theirs:
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        self._control = mine
        self._selector.register(mine, selectors.EVENT_READ, mine)

    def _end_launcher(self) -> None:
        """End the launcher and all its jobs, whose futures the caller must complete."""
        launcher = self._launcher
        control = self._control
        if launcher is None or control is None:
            return
        self._selector.unregister(control)
        control.close()
        launcher.kill()
        launcher.wait()
        for link in [*self._links, *(job.link for job in self._jobs.values() if job.link is not None)]:
            self._close(link)
        self._links.clear()
        self._prepared.clear()
        self._launcher = self._control = None

    @property
    def _end_of_silence(self) -> float:
        """Handle a launcher that does not report because it hangs or was stopped."""
        if preparing := [began for began in self._prepared.values() if began is not None]:
            return min(preparing) + _PREPARATION_SECONDS
        killed = (job.killed for job in self._jobs.values() if job.failure is not None)
        return min(killed, default=float("inf")) + _SILENCE_SECONDS

    def _lose_launcher(self, reason: str) -> None:
        """Forget a launcher that has ended. The next job starts another one."""
        logger.error("The launcher of the worker processes %s; its jobs fail", reason)
        self._end_launcher()
        for job in self._jobs.values():
            _fail(job, WorkerError(f"the launcher of the worker processes {reason}"))
        self._jobs.clear()
        self._running.clear()
        self._stopped.clear()

    def _close(self, link: socket.socket) -> None:
        if link.fileno() >= 0:
            self._selector.unregister(link)
            link.close()

    # ---- events

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, mask in events:
            if key.fileobj is self._wake:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
            elif key.fileobj is self._control:
                self._read_report()
            elif isinstance(key.data, Job):
                if key.data.link is not None and key.data.link.fileno() >= 0:
                    self._exchange(key.data, mask)
            elif isinstance(key.data, socket.socket) and key.data in self._links:
                self._send_preparation(key.data)

    def _send_preparation(self, link: socket.socket) -> None:
        rest = _send(link, self._links[link])
        if rest is None or not rest:
            del self._links[link]
            self._close(link)
        else:
            self._links[link] = rest

    def _exchange(self, job: Job, mask: int) -> None:
        """Send a job's input, and read its reply."""
        assert job.link is not None
        if mask & selectors.EVENT_WRITE:
            job.to_send = _send(job.link, job.to_send) or memoryview(b"")
            if not job.to_send:
                self._selector.modify(job.link, selectors.EVENT_READ, job)
        if mask & selectors.EVENT_READ and not self._read_answer(job):
            self._close(job.link)

    def _read_answer(self, job: Job) -> bool:
        """Read a piece of data. Returns whether there was any. The reply of a killed job is dropped."""
        assert job.link is not None
        try:
            data = job.link.recv(_CHUNK)
        except OSError:
            data = b""
        if not data or job.failure is not None:
            return False
        job.received += data
        if job.size is None and len(job.received) >= HEADER.size:
            (job.size,) = HEADER.unpack_from(job.received)
            if job.size > job.limits.result_bytes:
                size = f"{job.limits.result_bytes / MIB:g} MiB"
                self._kill(job, LimitExceededError("result", f"its result has more than {size}"))
                return False
        return True

    def _read_report(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(PACKET)
        except OSError:
            data = b""
        if not data:
            self._lose_launcher("has ended")
            return
        name, identity, *fields = msgspec.msgpack.decode(data)
        now = time.monotonic()
        if name == "prepared":
            began = self._prepared[identity]
            self._prepared[identity] = None
            self._next_deadline = 0.0
            for job in (*self._waiting, *self._jobs.values()):
                if began is not None and job.preparation is not None and job.preparation.key == identity:
                    job.deadline += now - max(began, job.submitted)
        elif (job := self._jobs[identity]) is not None and name == "started":
            job.pid = fields[0]
            job.resumed = now
            job.next_look = now + job.limits.slice_seconds
        else:
            del self._jobs[identity]
            self._leave_slot(job)
            if name == "failed":
                _fail(job, WorkerError(fields[0]))
            else:
                self._conclude(job, *fields)
            if job.link is not None:
                self._close(job.link)

    def _conclude(self, job: Job, status: int, cpu_seconds: float) -> None:
        """Complete the future of a job whose process has ended."""
        while job.link is not None and job.link.fileno() >= 0 and self._read_answer(job):
            pass
        if job.failure is not None:
            return
        limits = job.limits
        code = os.waitstatus_to_exitcode(status)
        if code in (-signal.SIGPROF, -signal.SIGXCPU) or (code == -signal.SIGKILL and cpu_seconds > limits.cpu_seconds):
            _fail(job, LimitExceededError("cpu", f"it needs more than {limits.cpu_seconds:g} s of processor time"))
            return
        answer: tuple[Any, ...] | list[Any] = ()
        if job.size is not None and len(job.received) == HEADER.size + job.size:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                answer = msgspec.msgpack.decode(memoryview(job.received)[HEADER.size :])
        _settle(job, answer, code)


def _settle(job: Job, answer: Sequence[Any], code: int) -> None:
    memory = f"{job.limits.memory_bytes / MIB:g} MiB"
    match answer:
        case ["result", value]:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                job.future.set_result(value)
        case ["refused", str(text)]:
            _fail(job, ValueError(text))
        case ["failed", str(text), str(trace)]:
            logger.debug("A job of the pool of worker processes failed: %s", trace)
            _fail(job, WorkerError(text))
        case ["memory"]:
            _fail(job, LimitExceededError("memory", f"it needs more than {memory} of memory"))
        case _:
            ending = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            reason = f"its process ended with {ending}, perhaps since it needs more than {memory} of memory"
            _fail(job, LimitExceededError("crash", reason))


def _fail(job: Job, error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        job.future.set_exception(error)


def _slice_end(job: Job) -> float:
    return job.resumed + job.limits.slice_seconds


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process; 0 if it has ended."""
    clock = ~pid << 3 | 2  # the process's CPU clock, computed as by Linux's clock_getcpuclockid
    try:
        return time.clock_gettime(clock) if pid else 0.0
    except OSError:
        return 0.0


def _send(link: socket.socket, data: memoryview) -> memoryview | None:
    """Return the remaining data. None if the peer has disconnected."""
    try:
        return data[link.send(data[:_CHUNK]) :]
    except BlockingIOError:
        return data
    except OSError:
        return None
