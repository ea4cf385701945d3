"""The state of a running engine, from the events of its server's page (quire.server.page) or from its metrics."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

MOST_STEPS = 512
MOST_RATES = 512
WINDOW_SECONDS = 10.0  # of rates and percentiles that are taken from metrics
STATIONS = ("schedule", "submit", "sample", "wait", "update")


@dataclass
class Picture:
    """kv_usage: 0 to 1. hit_rate: of tokens looked up in the prefix cache; None if there were none. output, prompt:
    tokens per second, the latest last. first_token, gaps: the 50th, 90th and 99th percentiles in milliseconds; empty
    without requests. steps, requests: as in quire.server.page. cells: the map of blocks.
    has_details: whether there are steps, requests and cells. others: additional facts by name."""

    state: str = ""
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    kv_usage: float = 0.0
    num_blocks: int = 0
    hit_rate: float | None = None
    output: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_RATES))
    prompt: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_RATES))
    first_token: Sequence[float] = ()
    gaps: Sequence[float] = ()
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    requests: list[dict[str, Any]] = field(default_factory=list)
    cells: str = ""
    has_details: bool = True
    others: dict[str, str] = field(default_factory=dict)


class EventReader:
    """Accumulates the events of a page's stream."""

    def __init__(self) -> None:
        self.picture = Picture()
        self._maps: list[str] = []  # of each core

    def take(self, event: Mapping[str, Any]) -> None:
        picture = self.picture
        if "problem" in event:
            picture.state = "dead"
            picture.running = 0
            picture.requests = []
            return
        picture.state = event["state"]
        picture.restarts = event["restarts"]
        views = event["views"]
        if event["is_whole"]:
            self._maps = ["" for _ in views]
            picture.steps.clear()
        elif len(views) != len(self._maps):
            return  # a core was lost: the next event is whole
        for number, view in enumerate(views):
            for part in view["cells"]:
                start = part["start"]
                states = part["states"]
                old = self._maps[number]
                self._maps[number] = old[:start] + states + old[start + len(states) :]
            picture.steps.extend(view["steps"])
        picture.cells = "".join(self._maps)
        picture.requests = [request for view in views for request in view["requests"]]
        picture.running, picture.waiting = _sum(views, "num_running"), _sum(views, "num_waiting")
        picture.num_blocks = _sum(views, "num_blocks")
        picture.kv_usage = 1 - _sum(views, "num_free") / picture.num_blocks if picture.num_blocks else 0.0
        totals = [view["totals"] for view in views]
        picture.preemptions = _sum(totals, "preemptions")
        queries = _sum(totals, "prefix_queries")
        picture.hit_rate = _sum(totals, "prefix_hits") / queries if queries else None
        rates = [view["rates"] for view in views]
        picture.output.append(sum(rate["output"] for rate in rates))
        picture.prompt.append(sum(rate["prompt"] for rate in rates))
        # Percentiles of several cores cannot be combined, so the worst core's are shown.
        picture.first_token = max((view["ttft"] for view in views), default=[], key=_worst)
        picture.gaps = max((view["gaps"] for view in views), default=[], key=_worst)


def _worst(times: Sequence[float]) -> float:
    return times[-1] if times else 0.0


def _sum(parts: Sequence[Mapping[str, Any]], name: str) -> int:
    return int(sum(part[name] for part in parts))


class MetricsReader:
    """Compares the metrics of a server, of Quire or of vLLM, with those of some seconds earlier."""

    def __init__(self) -> None:
        self.picture = Picture(has_details=False, state="ready")
        self._earlier: deque[tuple[float, dict[str, float], dict[str, dict[float, float]]]] = deque()

    def take(self, text: str, now: float) -> None:
        """text: in Prometheus' format. now: by time.monotonic(). Raises ValueError for any other text."""
        sums, buckets, others = _read(text)
        if "num_requests_running" not in sums:
            raise ValueError("these metrics are not those of an engine")
        if self._earlier and sums.get("generation_tokens_total", 0) < self._earlier[-1][1]["generation_tokens_total"]:
            self._earlier.clear()  # the server was started again
        self._earlier.append((now, sums, buckets))
        while len(self._earlier) > 2 and now - self._earlier[1][0] >= WINDOW_SECONDS:
            self._earlier.popleft()
        old_buckets = self._earlier[0][2]
        recent = self._earlier[-2] if len(self._earlier) > 1 else self._earlier[0]
        seconds = max(now - recent[0], 1e-3)
        picture = self.picture
        picture.running, picture.waiting = int(sums["num_requests_running"]), int(sums.get("num_requests_waiting", 0))
        picture.preemptions = int(sums.get("num_preemptions_total", 0))
        picture.kv_usage = sums.get("kv_cache_usage_perc", 0.0)
        queries = sums.get("prefix_cache_queries_total", 0.0)
        picture.hit_rate = sums.get("prefix_cache_hits_total", 0.0) / queries if queries else None
        for rates, name in ((picture.output, "generation_tokens_total"), (picture.prompt, "prompt_tokens_total")):
            rates.append((sums.get(name, 0.0) - recent[1].get(name, 0.0)) / seconds)
        names = "time_to_first_token_seconds", "inter_token_latency_seconds"
        picture.first_token, picture.gaps = (_percentiles(buckets.get(n, {}), old_buckets.get(n, {})) for n in names)
        picture.others = others


_Values = tuple[dict[str, float], dict[str, dict[float, float]], dict[str, str]]


def _read(text: str) -> _Values:
    """Sums of metrics over labels, histogram buckets, and facts. Names have no prefix."""
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    ended: dict[str, float] = {}
    memory: dict[str, float] = {}
    model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if family.type == "histogram":
                if name.endswith("_bucket"):
                    found = buckets.setdefault(name.removesuffix("_bucket"), {})
                    bound = float(sample.labels["le"])
                    found[bound] = found.get(bound, 0.0) + sample.value
                continue
            sums[name] = sums.get(name, 0.0) + sample.value
            model = model or sample.labels.get("model_name", "")
            if name == "request_success_total":
                reason = sample.labels.get("finished_reason", "")
                ended[reason] = ended.get(reason, 0.0) + sample.value
            elif name == "process_resident_memory_bytes":
                memory[sample.labels.get("process", "process")] = sample.value
    cores = sum(1 for line in text.splitlines() if ":kv_cache_usage_perc{" in line)
    sums["kv_cache_usage_perc"] = sums.get("kv_cache_usage_perc", 0.0) / max(cores, 1)
    others = {"Model": model}
    others["Ended"] = ", ".join(f"{int(count):,} {reason}" for reason, count in ended.items() if count) or "none"
    others["Memory"] = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items())
    return sums, buckets, {name: text for name, text in others.items() if text}


def _percentiles(new: Mapping[float, float], old: Mapping[float, float]) -> Sequence[float]:
    """In milliseconds, from cumulative buckets, within which values are assumed to be evenly distributed."""
    counts = [(bound, new[bound] - old.get(bound, 0.0)) for bound in sorted(new)]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return ()
    found = []
    for share in (0.5, 0.9, 0.99):
        low = below = 0.0
        for bound, count in counts:
            if count >= share * total:
                inside = count - below
                width = 0.0 if bound == float("inf") else bound - low
                found.append(1000 * (low + width * (share * total - below) / inside if inside else low))
                break
            low = bound
            below = count
    return found
