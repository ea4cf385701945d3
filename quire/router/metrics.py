"""The proxy's own metrics, in Prometheus' format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from quire.observability.exposition import exposition

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouteMetrics:
    """All metrics. A server's metrics have the labels `backend`, its URL, and `kind`, the option that names it."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.answers = Counter(
            "quire_route_requests",
            "Requests by the server and the status of the answer",
            ["kind", "backend", "status"],
            registry=registry,
        )
        self.first_byte = Histogram(
            "quire_route_time_to_first_byte_seconds",
            "Time from the request's last byte to the answer's first",
            ["kind", "backend"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.retries = Counter(
            "quire_route_retries",
            "Requests that a server did not take, by the reason: they were sent to another",
            ["kind", "backend", "reason"],
            registry=registry,
        )
        labels = ["kind", "backend"]
        self.in_flight = Gauge("quire_route_requests_in_flight", "Requests at a server", labels, registry=registry)
        self.up = Gauge("quire_route_backend_up", "Whether a server gets requests", labels, registry=registry)
        self.errors = Counter(
            "quire_route_errors", "Errors of the proxy itself, by the code in the answer", ["code"], registry=registry
        )
        self.disconnects = Counter(
            "quire_route_client_disconnects", "Clients that left before the end of the answer", registry=registry
        )
        self.decisions = Counter(
            "quire_route_decisions",
            "Decisions of the semantic router, by the rule and the model",
            ["rule", "model"],
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "quire_route_decision_seconds",
            "Time of the semantic router's decisions",
            buckets=(0.001, 0.002, 0.005, *_SECONDS[1:9]),
            registry=registry,
        )
        self.cache_hits = Counter(
            "quire_route_semantic_cache_hits", "Answers from the semantic cache", registry=registry
        )

    def of_backend(self, kind: str, url: str) -> "BackendMetrics":
        return BackendMetrics(self, kind, url)

    def render(self) -> bytes:
        return exposition(self.registry)


class BackendMetrics:
    """The metrics of one server. They are looked up once, since the lookup takes longer than counting."""

    def __init__(self, metrics: RouteMetrics, kind: str, url: str) -> None:
        self._metrics = metrics
        self._labels = (kind, url)
        self.up = metrics.up.labels(kind, url)
        self.in_flight = metrics.in_flight.labels(kind, url)
        self.first_byte = metrics.first_byte.labels(kind, url)
        self._answers: dict[int, Counter] = {}

    def count_answer(self, status: int) -> None:
        if (counter := self._answers.get(status)) is None:
            counter = self._answers[status] = self._metrics.answers.labels(*self._labels, str(status))
        counter.inc()

    def count_retry(self, reason: str) -> None:
        self._metrics.retries.labels(*self._labels, reason).inc()
