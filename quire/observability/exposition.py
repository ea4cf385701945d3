"""Metrics in Prometheus' text format. The metrics of several API processes are added."""

import mmap
import os
from typing import Any

import prometheus_client.values
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from quire.messages.errors import error_text
from quire.observability.logging import logger

# The environment variable that makes prometheus_client store the values in files, which all processes can read.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def are_shared() -> bool:
    """Whether this is one of several processes whose metrics are shown together."""
    return SHARED_FOLDER in os.environ


def exposition(registry: CollectorRegistry) -> bytes:
    """Return the metrics of a registry, or those of all registries of all processes."""
    if are_shared():
        registry = CollectorRegistry()
        MultiProcessCollector(registry, os.environ[SHARED_FOLDER])  # type: ignore[no-untyped-call]
    return generate_latest(registry)


class SharedValues(MmapedDict):
    """The values of a process in a file whose disk blocks are reserved. Otherwise, a write to the mapped file on a full
    disk would end the process (SIGBUS). A process that gets no more blocks continues to count in memory, without
    showing it."""

    _SIZE = 1 << 16  # initial size in bytes

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        if not read_mode:
            with open(filename, "ab") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, self._SIZE)
                except OSError as error:
                    os.unlink(filename)  # otherwise other processes would read it
                    filename = f"/proc/self/fd/{_memory(error)}"
        super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        size = self._capacity
        while self._used + len(key.encode()) + 32 > size:  # its length, up to 8 spaces and two numbers
            size *= 2
        if size > self._capacity:
            try:
                os.posix_fallocate(self._f.fileno(), 0, size)
            except OSError as error:
                self._leave_file(error)
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _leave_file(self, error: OSError) -> None:
        file: Any = open(_memory(error), "r+b")  # noqa: SIM115
        file.write(self._m[:])
        file.flush()
        self._m.close()
        self._f.close()
        self._f, self._m = file, mmap.mmap(file.fileno(), self._capacity)


def _memory(error: OSError) -> int:
    logger.error("The metrics of this process cannot be shown from now on: %s", error_text(error))
    return os.memfd_create("quire-metrics")


prometheus_client.values.MmapedDict = SharedValues  # type: ignore[attr-defined]
