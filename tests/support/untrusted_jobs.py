"""Jobs for the pool of worker processes: harmless ones, and one for each way in which a job can misbehave."""

import ctypes
import os
import signal
import socket
import sys
import time
from typing import Any


def double(value: int) -> int:
    return 2 * value


def echo(*values: Any) -> list[Any]:
    return list(values)


def process() -> list[int]:
    return [os.getpid(), os.getppid()]


def loop() -> None:
    while True:
        pass


def busy(seconds: float) -> str:
    """Use processor time."""
    while time.process_time() < seconds:
        pass
    return "done"


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def hog() -> int:
    return sum(map(len, [bytes(1 << 20) for _ in range(1 << 20)]))


def touch_nothing(size: int) -> int:
    return len(bytes(size))


def segfault() -> None:
    ctypes.string_at(0)


def end(status: int) -> None:
    os._exit(status)


def kill_itself() -> None:
    signal.raise_signal(signal.SIGKILL)


def print_garbage(size: int) -> str:
    for stream in (sys.stdout, sys.stderr):
        print("\x00garbage" * size, file=stream, flush=True)
    os.write(1, b"garbage" * size)
    return "printed"


def refuse(text: str) -> None:
    raise ValueError(text)


def fail() -> None:
    raise KeyError("name")


def panic() -> None:
    raise BaseException("a library panics")


def unencodable() -> object:
    return object()


def connect() -> str:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        return type(error).__name__
    return "connected"


def kill(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return type(error).__name__
    return "sent"


def write(path: str) -> str:
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(b"bytes")
    except OSError as error:
        return type(error).__name__
    return "written"


def facts() -> dict[str, Any]:
    return {
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
        "environment": sorted(os.environ),
        "modules": sorted({"torch", "transformers", "asyncio", "numpy"} & sys.modules.keys()),
        "nice": os.nice(0),
    }


def prepare(*values: Any) -> dict[str, Any]:
    return {"values": list(values), "pid": os.getpid()}


def prepare_slowly(seconds: float) -> str:
    time.sleep(seconds)
    return "slowly"


def prepare_badly() -> None:
    raise RuntimeError("there is no such tokenizer")


def use(prepared: dict[str, Any], value: int) -> list[Any]:
    return [prepared["values"], prepared["pid"], os.getppid(), value]


def with_prepared(prepared: Any, *values: Any) -> list[Any]:
    return [prepared, *values]
