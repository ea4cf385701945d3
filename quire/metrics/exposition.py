"""Metrics in Prometheus' text format. Those of several API processes are added up."""

import os

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

# The environment variable that makes prometheus_client keep the values in files, which all processes can read.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def are_shared() -> bool:
    """Whether this is one of several processes whose metrics are shown together."""
    return SHARED_FOLDER in os.environ


def exposition(registry: CollectorRegistry) -> bytes:
    """The metrics of a registry, or those of all registries of all processes."""
    if are_shared():
        registry = CollectorRegistry()
        MultiProcessCollector(registry, os.environ[SHARED_FOLDER])  # type: ignore[no-untyped-call]
    return generate_latest(registry)
