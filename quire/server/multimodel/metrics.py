"""Metrics of the model table, and those of all loaded models together."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.server.multimodel.served_model import Status

if TYPE_CHECKING:
    from quire.server.multimodel.table import ModelTable

_SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class TableMetrics(Collector):
    """Counts loads and unloads, and reports the states of the models."""

    def __init__(self, prefix: str, table: "ModelTable") -> None:
        self._prefix = prefix
        self._table = table
        self._registry = CollectorRegistry()
        self._registry.register(self)
        names = ["model_name"]
        registry = self._registry
        self._seconds = Histogram(
            f"{prefix}:model_load_seconds", "Seconds to load a model", names, buckets=_SECONDS, registry=registry
        )
        self._failures = Counter(f"{prefix}:model_load_failures", "Loads that failed", names, registry=registry)
        self._unloads = Counter(f"{prefix}:model_unloads", "Models that were unloaded", names, registry=registry)

    def loaded(self, name: str, seconds: float) -> None:
        self._seconds.labels(name).observe(seconds)

    def failed(self, name: str) -> None:
        self._failures.labels(name).inc()

    def unloaded(self, name: str) -> None:
        self._unloads.labels(name).inc()

    def collect(self) -> Iterable[Metric]:
        models = self._table.models
        states = GaugeMetricFamily(f"{self._prefix}:models", "Models in each state", labels=["state"])
        for status in Status:
            states.add_metric([status], sum(model.status is status for model in models))
        memory = GaugeMetricFamily(
            f"{self._prefix}:model_memory_bytes", "Memory reserved for a loaded model", labels=["model_name"]
        )
        for model in models:
            if model.memory:
                memory.add_metric([model.name], model.memory)
        total = GaugeMetricFamily(f"{self._prefix}:models_memory_bytes", "Memory for all models together")
        total.add_metric([], self._table.machine.memory)
        return states, memory, total

    def render(self) -> bytes:
        """Return the table's metrics and those of all loaded engines in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_Merged(self._table))
        return generate_latest(self._registry) + generate_latest(registry)


class _Merged(Collector):
    """The metrics of all loaded engines. Each sample has the label model_name."""

    def __init__(self, table: "ModelTable") -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, loaded in self._table.loaded:
            for family in loaded.llm.metric_families():
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {"model_name": model.name, **sample.labels}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()
