"""Memory, processor time, files and start of all processes of a server on this machine, as `process_*` metrics."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.engine.core_client import CoreClient
from quire.messages.errors import error_text
from quire.observability.exposition import SHARED_FOLDER, are_shared
from quire.observability.logging import logger

_SUMMED = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
)


def write_pid(name: str, pid: int | None) -> None:
    """Announce a process to all API processes. name: its name in the metrics."""
    try:
        (Path(os.environ[SHARED_FOLDER]) / f"{name}.pid").write_text(str(pid or ""), encoding="ascii")
    except OSError as error:
        logger.warning("The metrics of %s as a process are not shown: %s", name, error_text(error))


def server_processes(client: CoreClient) -> dict[str, int]:
    """Return the process ids of the API processes and of this machine's cores by name, such as "api 0"."""
    if are_shared():
        files = sorted(Path(os.environ[SHARED_FOLDER]).glob("*.pid"))
        return {file.stem: int(text) for file in files if (text := file.read_text(encoding="ascii"))}
    cores = zip(client.config.layout.here, client.process_ids, strict=True)
    return {f"api {client.index}": os.getpid(), **{f"core {number}": pid for number, pid in cores if pid}}


class ProcessMetrics(Collector):
    """The metrics of prometheus_client's ProcessCollector for several processes, with the label `process`.

    find: returns the ids by name. has_ranks: whether cores run their ranks in child processes, whose values are added.
    """

    def __init__(self, find: Callable[[], Mapping[str, int]], has_ranks: bool) -> None:
        self._find = find
        self._has_ranks = has_ranks

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, pid in self._find().items():
            for family, sample in _metrics_of(pid):
                found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                found.add_sample(sample.name, {"process": name}, sample.value)
            if self._has_ranks and name.startswith("core "):
                for metric, value in _sums_of_children(pid).items():
                    families[metric.removesuffix("_total")].add_sample(metric, {"process": f"ranks of {name}"}, value)
        return families.values()


def _metrics_of(pid: int) -> Iterator[tuple[Metric, Any]]:
    """Yield the metrics of a process, each with its sample. Yields nothing if the process has ended."""
    for family in ProcessCollector(pid=lambda: pid, registry=None).collect():
        (sample,) = family.samples
        yield family, sample


def _sums_of_children(pid: int) -> dict[str, float]:
    """Return the sums of the additive metrics over a process's children, by name."""
    sums: dict[str, float] = {}
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return {}
    for child in children:
        for _, sample in _metrics_of(child.pid):
            if sample.name in _SUMMED:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
