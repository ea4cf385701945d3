"""The pool of worker processes for untrusted work, with real faults."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from quire.platform.untrusted.limits import BusyError, LimitExceededError, Limits, WorkerError
from quire.platform.untrusted.pool import UntrustedPool, shared_pool
from quire.platform.untrusted.service import Preparation
from support.waiting import LONGEST, eventually

MIB = 1 << 20
LIMITS = Limits(cpu_seconds=LONGEST, memory_bytes=256 * MIB, total_seconds=LONGEST)
SHORT = Limits(cpu_seconds=0.1, memory_bytes=256 * MIB, total_seconds=LONGEST)
JOBS = "support.untrusted_jobs:"


@pytest.fixture(scope="module")
def pool() -> Iterator[UntrustedPool]:
    subject = UntrustedPool(idle_seconds=LONGEST)
    yield subject
    end(subject)


def end(subject: UntrustedPool) -> None:
    """End a pool that is idle."""
    subject.idle_seconds = 0.0
    with subject._lock:
        subject._notify()
    eventually(lambda: subject._wake is None)


def run(pool: UntrustedPool, name: str, *arguments: Any, limits: Limits = LIMITS, **options: Any) -> Any:
    return pool.run(JOBS + name, *arguments, limits=limits, **options)


def submit(pool: UntrustedPool, name: str, *arguments: Any, limits: Limits = LIMITS) -> "Future[Any]":
    return pool.submit(JOBS + name, *arguments, limits=limits)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_job_gets_plain_data_and_returns_plain_data(pool):
    values = [1, -2.5, "text", b"\x00\xff", None, True, [1, [2]], {"a": {"b": []}}]
    assert run(pool, "echo", *values) == values
    large = os.urandom(1 << 20) * 20
    assert run(pool, "echo", large) == [large]


def test_each_job_has_a_process_of_its_own_below_the_launcher(pool):
    (first, launcher), (second, same) = run(pool, "process"), run(pool, "process")
    assert first != second
    assert launcher == same
    assert launcher not in (first, os.getpid())


@pytest.mark.parametrize(
    ("name", "arguments", "limits", "limit", "text"),
    [
        ("loop", [], SHORT, "cpu", "it needs more than 0.1 s of processor time"),
        ("hog", [], LIMITS, "memory", "it needs more than 256 MiB of memory"),
        ("touch_nothing", [300 * MIB], LIMITS, "memory", "it needs more than 256 MiB of memory"),
        ("segfault", [], LIMITS, "crash", "its process ended with SIGSEGV"),
        ("kill_itself", [], LIMITS, "crash", "its process ended with SIGKILL"),
        ("end", [3], LIMITS, "crash", "its process ended with exit status 3"),
        ("end", [0], LIMITS, "crash", "its process ended with exit status 0"),
        ("touch_nothing", [1], Limits(1, MIB, LONGEST, result_bytes=1), "result", "its result has more than"),
    ],
)
def test_a_job_that_exceeds_a_limit_fails_alone_and_names_it(pool, name, arguments, limits, limit, text):
    others = [submit(pool, "busy", 0.05), submit(pool, "echo", name)]
    with pytest.raises(LimitExceededError, match=text) as caught:
        run(pool, name, *arguments, limits=limits)
    assert caught.value.limit == limit
    assert [other.result(LONGEST) for other in others] == ["done", [name]]


def test_exceptions_are_told_apart_by_who_can_act(pool):
    with pytest.raises(ValueError, match=r"^the field x is wrong$"):
        run(pool, "refuse", "the field x is wrong")
    for name, text in [
        ("fail", "KeyError: 'name'"),
        ("panic", "a library panics"),
        ("unencodable", "type object"),
        ("no_such_job", "no attribute 'no_such_job'"),
    ]:
        with pytest.raises(WorkerError, match=text):
            run(pool, name)
    with pytest.raises(WorkerError, match="No module named 'no_such_module'"):
        pool.run("no_such_module:job", limits=LIMITS)


def test_what_a_job_prints_goes_nowhere(pool, capfd):
    assert run(pool, "print_garbage", 100_000) == "printed"
    assert capfd.readouterr() == ("", "")


def test_a_job_reaches_no_network_no_other_process_and_no_file(pool, tmp_path):
    assert run(pool, "connect") == "PermissionError"
    assert run(pool, "kill", os.getpid()) == "PermissionError"
    assert run(pool, "write", str(tmp_path / "file")) == "OSError"


def test_a_job_inherits_no_descriptor_no_secret_and_no_large_module(pool, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    fresh = UntrustedPool()
    facts = run(fresh, "facts")
    assert len(facts["descriptors"]) == 5  # three standard streams, the socket and the listing
    assert "HF_TOKEN" not in facts["environment"]
    assert not facts["modules"]
    assert facts["nice"] == os.nice(0)
    end(fresh)


def test_a_quick_job_does_not_wait_for_slow_ones(pool):
    slow = [submit(pool, "loop") for _ in range(7)]
    assert [run(pool, "double", n) for n in range(5)] == [0, 2, 4, 6, 8]
    assert not any(job.done() for job in slow)
    assert all(job.cancel() for job in slow)
    assert run(pool, "double", 1) == 2


def test_slow_jobs_take_turns_and_all_end(pool):
    jobs = [submit(pool, "busy", 0.15) for _ in range(4)]
    assert [job.result(LONGEST) for job in jobs] == ["done"] * 4


def test_new_jobs_make_the_longest_one_leave_when_all_places_are_taken(monkeypatch):
    pool = UntrustedPool(slots=1, places=2)
    slow = [submit(pool, "loop") for _ in range(2)]
    monkeypatch.setattr(Limits, "patience", 0.2)
    assert run(pool, "double", 4) == 8
    eventually(lambda: any(job.done() for job in slow))
    failed, going_on = sorted(slow, key=lambda job: not job.done())
    assert not going_on.done()
    with pytest.raises(BusyError, match="it had to make room for other requests after"):
        failed.result()
    going_on.cancel()
    end(pool)


def test_the_time_in_the_queue_counts():
    pool = UntrustedPool(slots=1, places=1)
    patient = Limits(LONGEST, 64 * MIB, LONGEST, slice_seconds=LONGEST)
    first = submit(pool, "sleep", LONGEST, limits=patient)
    with pytest.raises(BusyError, match=r"it waited for other requests for 0.2 s, the limit"):
        run(pool, "double", 1, limits=Limits(1, 64 * MIB, total_seconds=0.2))
    first.cancel()
    with pytest.raises(BusyError, match=r"it took more than 0.2 s, including the time it waited for others"):
        run(pool, "sleep", LONGEST, limits=Limits(1, 64 * MIB, total_seconds=0.2))
    end(pool)


def test_a_full_queue_fails_at_once():
    pool = UntrustedPool(queue=3)
    jobs = [submit(pool, "sleep", LONGEST) for _ in range(3)]
    with pytest.raises(BusyError, match="3 jobs of this kind are waiting or running, which is the limit"):
        submit(pool, "double", 1)
    jobs[0].cancel()
    assert run(pool, "double", 1) == 2
    for job in jobs:
        job.cancel()
    end(pool)


def test_a_cancelled_task_ends_its_job(pool):
    async def client() -> None:
        task = asyncio.create_task(pool.run_async(JOBS + "loop", limits=LIMITS))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await pool.run_async(JOBS + "double", 2, limits=LIMITS) == 4

    asyncio.run(client())
    eventually(lambda: pool._count == 0)


def test_many_threads_share_a_pool(pool):
    results: list[int] = []

    def client(number: int) -> None:
        for n in range(5):
            results.append(run(pool, "double", 5 * number + n))

    threads = [threading.Thread(target=client, args=[number]) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    assert sorted(results) == list(range(0, 100, 2))


def test_a_preparation_runs_once_in_the_launcher_and_its_time_does_not_count(pool):
    made: list[int] = []
    preparation = Preparation("table", JOBS + "prepare", lambda: made.append(1) or [b"x" * 5 * MIB])
    first = run(pool, "use", 1, preparation=preparation)
    assert first[0] == [b"x" * 5 * MIB]
    assert first[1] == first[2]
    assert first[3] == 1
    assert run(pool, "use", 2, preparation=preparation) == [*first[:3], 2]
    assert made == [1]
    slow = Preparation("slow", JOBS + "prepare_slowly", lambda: [0.5])
    quick = Limits(1, 64 * MIB, total_seconds=0.4)
    assert run(pool, "with_prepared", 1, limits=quick, preparation=slow) == ["slowly", 1]
    bad = Preparation("bad", JOBS + "prepare_badly", list)
    with pytest.raises(WorkerError, match="there is no such tokenizer"):
        run(pool, "with_prepared", 1, preparation=bad)


def test_a_killed_launcher_fails_its_jobs_and_is_replaced():
    pool = UntrustedPool()
    _, launcher = run(pool, "process")
    job = submit(pool, "sleep", LONGEST)
    eventually(lambda: children(launcher))
    (pid,) = children(launcher)
    os.kill(launcher, signal.SIGKILL)
    with pytest.raises(WorkerError, match="the launcher of the worker processes has ended"):
        job.result(LONGEST)
    eventually(lambda: not is_alive(pid))
    assert run(pool, "process")[1] != launcher
    end(pool)


def test_only_a_job_that_takes_longer_than_usual_gets_a_lower_priority():
    pool = UntrustedPool()
    _, launcher = run(pool, "process")
    job = submit(pool, "loop")
    eventually(lambda: children(launcher))
    (pid,) = children(launcher)
    eventually(lambda: os.getpriority(os.PRIO_PROCESS, pid) == os.nice(0) + 5)
    assert run(pool, "facts")["nice"] == os.nice(0)
    job.cancel()
    end(pool)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_an_idle_pool_has_no_process_and_starts_again():
    pool = UntrustedPool(idle_seconds=0.0)
    _, first = run(pool, "process")
    eventually(lambda: pool._wake is None)
    eventually(lambda: not is_alive(first))
    assert run(pool, "process")[1] != first
    eventually(lambda: pool._wake is None)


def test_all_processes_end_with_a_parent_that_is_killed():
    code = (
        "import time; from quire.platform.untrusted.limits import Limits\n"
        "from quire.platform.untrusted.pool import shared_pool\n"
        "limits = Limits(cpu_seconds=600, memory_bytes=1 << 28, total_seconds=600)\n"
        "pool = shared_pool()\n"
        f"launcher = pool.run('{JOBS}process', limits=limits)[1]\n"
        f"job = pool.submit('{JOBS}loop', limits=limits)\n"
        "print(launcher, flush=True); time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        launcher = int(parent.stdout.readline())
        eventually(lambda: children(launcher))
        (job,) = children(launcher)
        parent.kill()
    eventually(lambda: not is_alive(launcher) and not is_alive(job))


def test_the_modules_of_grammars_bring_no_large_ones():
    code = (
        "import sys, quire.platform.untrusted.launcher, quire.structured.guidance, quire.structured.workers\n"
        "print({'numpy', 'hashlib', 'asyncio', 'logging', 'concurrent'} & sys.modules.keys())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-S", "-c", code]
    assert subprocess.run(command, capture_output=True, env=environment, text=True).stdout == "set()\n"


def test_a_process_has_one_shared_pool_and_a_fork_has_its_own():
    pool = shared_pool()
    assert shared_pool() is pool
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, b"other" if shared_pool() is not pool else b"same")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"other"
    os.close(reader)
    os.close(writer)


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="memory_bytes must be positive, got 0"):
        Limits(cpu_seconds=1, memory_bytes=0)
