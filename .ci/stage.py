"""A stage of .ci/run: runs a command, ends it after a time limit, and measures it.

    stage.py TABLE NAME LIMIT COMMAND...    run a stage, and add a row to TABLE
    stage.py TABLE                          print the table

LIMIT is in seconds. If STAGES_END is set, all stages end at that time at the latest (seconds since the epoch).

A command that runs too long is interrupted, as by Ctrl-C. A minute later, it is killed with all processes below it,
whatever sessions they belong to. Processes that a command leaves running when it ends are killed, too.

Processor time is user + system time of all these processes.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

SET_CHILD_SUBREAPER = 36  # of prctl: orphans below this process become its children
SECONDS_TO_END = 60
SECONDS_LEFT = 5  # for what still runs when the command has ended
TIMED_OUT, INTERRUPTED = 124, 130  # exit statuses, as those of timeout(1) and of shells


def descendants(pid):
    try:
        children = [c for path in Path(f"/proc/{pid}/task").glob("*/children") for c in path.read_text().split()]
    except OSError:  # it has just ended
        return
    for child in children:
        yield int(child)
        yield from descendants(child)


def kill_descendants():
    """Returns the command lines of those that still run after some seconds."""
    killed = set()
    deadline = time.monotonic() + SECONDS_LEFT
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return sorted(killed)
        if time.monotonic() > deadline:
            for pid in list(descendants("self")):
                try:
                    killed.add(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:100])
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        time.sleep(0.05)


def wait(process, seconds):
    """The exit status, or None if the process still runs. Other children are reaped, which counts their time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        if pid == 0:
            time.sleep(0.05)
    return None


def interrupt(process):
    for number in (signal.SIGINT, signal.SIGTERM):  # the end is not interrupted again
        signal.signal(number, signal.SIG_IGN)
    os.killpg(process.pid, signal.SIGINT)
    if wait(process, SECONDS_TO_END) is None:
        print(f"It has not ended {SECONDS_TO_END} s later, and is killed.", flush=True)


def run(name, limit, command):
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell ignores SIGINT, as in its background jobs
        signal.signal(number, signal.default_int_handler)
    left = float(os.environ.get("STAGES_END", "inf")) - time.time()
    seconds = max(min(limit, left), 0)
    begin = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        status = wait(process, seconds)
        result = "passed" if status == 0 else "failed"
        if status is None:
            whose = f"its limit of {limit:.0f} s" if limit < left else f"the {seconds:.0f} s left for all stages"
            print(f"\nThe stage {name!r} has run longer than {whose}. It is interrupted.", flush=True)
            interrupt(process)
            status, result = TIMED_OUT, "ran too long"
    except KeyboardInterrupt:
        interrupt(process)
        status, result = INTERRUPTED, "interrupted"
    for line in kill_descendants():
        print(f"It left running, and is killed: {line}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return status, (time.monotonic() - begin, usage.ru_utime + usage.ru_stime, limit, result, name)


def show(row):
    return "{:>8.0f} {:>10.0f} {:>6.0f}  {:<12}  {}".format(*map(float, row[:3]), *row[3:])


def main(table, *arguments):
    if not arguments:
        rows = [line.split("\t") for line in Path(table).read_text().splitlines()]
        print("\n    wall  processor  limit  (seconds)")
        for row in rows:
            print(show(row))
        print(f"{sum(float(r[0]) for r in rows):8.0f} {sum(float(r[1]) for r in rows):10.0f}         in total")
        return 0
    name, limit, *command = arguments
    print(f"\n== {name}", flush=True)
    status, row = run(name, float(limit), command)
    print(f"== {name}: {row[3]} after {row[0]:.0f} s, {row[1]:.0f} s of processor time", flush=True)
    with Path(table).open("a") as file:
        print(*row, sep="\t", file=file)
    return status if status >= 0 else 128 - status


sys.exit(main(*sys.argv[1:]))
