"""Metrics as Python objects, compared with what Prometheus' own text parser reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.observability import reader


def test_a_snapshot_has_each_counter_gauge_and_histogram_with_its_labels():
    registry = CollectorRegistry()
    counter = Counter("quire:tokens", "", ["model"], registry=registry)
    counter.labels("a").inc(3)
    counter.labels("b").inc(5)
    Gauge("quire:running", "", registry=registry).set(2.5)
    histogram = Histogram("quire:seconds", "", ["model"], buckets=(1, 10), registry=registry)
    for model, value in (("a", 0.5), ("a", 7), ("a", 70), ("b", 1)):
        histogram.labels(model).observe(value)
    assert reader.snapshot(registry) == [
        reader.Counter("quire:tokens", {"model": "a"}, 3),
        reader.Counter("quire:tokens", {"model": "b"}, 5),
        reader.Gauge("quire:running", {}, 2.5),
        reader.Histogram("quire:seconds", {"model": "a"}, 3, 77.5, {"1.0": 1, "10.0": 2, "+Inf": 3}),
        reader.Histogram("quire:seconds", {"model": "b"}, 1, 1.0, {"1.0": 1, "10.0": 1, "+Inf": 1}),
    ]
    text = generate_latest(registry).decode()
    parsed = {family.name for family in text_string_to_metric_families(text)}
    assert {metric.name for metric in reader.snapshot(registry)} <= parsed
