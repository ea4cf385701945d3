"""A snapshot of metrics as Python objects: what `LLM.get_metrics` returns, in vLLM's classes."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family


@dataclass
class Metric:
    """A metric with one set of labels. name: without the suffixes of the text format, such as _total."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters with an order, such as one for each position of a speculated token. No metric of Quire is one yet."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """How often a value was observed, and the sum of the values. buckets: upper limit, up to "+Inf" → how many values
    were at most that."""

    count: int
    sum: float
    buckets: dict[str, int]


def snapshot(registry: CollectorRegistry) -> list[Metric]:
    """The counters, gauges and histograms of a registry as they are now."""
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
    """One for each set of labels but `le`, which is a bucket's limit."""
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
