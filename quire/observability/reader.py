"""A snapshot of metrics as Python objects, with vLLM's classes. `LLM.get_metrics` returns it."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family


@dataclass
class Metric:
    """A metric with one set of labels. The name has no suffix of the text format, such as _total."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A list of counters, such as one for each position of a draft token. Quire has no such metric yet."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """The number and the sum of the observed values. buckets: upper limit, up to "+Inf" → number of values up to this
    limit."""

    count: int
    sum: float
    buckets: dict[str, int]


def snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Return the current counters, gauges and histograms of a registry."""
    return [metric for family in registry.collect() for metric in _metrics(family)]


def _metrics(family: Family) -> list[Metric]:
    if family.type == "histogram":
        return _histograms(family)
    if family.type == "counter":
        values = [sample for sample in family.samples if sample.name == f"{family.name}_total"]
        return [Counter(family.name, sample.labels, int(sample.value)) for sample in values]
    if family.type == "gauge":
        return [Gauge(family.name, sample.labels, sample.value) for sample in family.samples]
    return []


def _histograms(family: Family) -> list[Metric]:
    """Return one histogram for each set of labels, without the label `le`, which is a bucket's limit."""
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        histogram = found.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    return list(found.values())
