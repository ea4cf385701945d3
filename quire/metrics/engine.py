"""An engine's statistics, as Prometheus metrics with vLLM's names and as log lines."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.messages.engine import CoreStats, EngineCoreOutput, EngineCoreRequest, FinishReason, SpeculationStats
from quire.metrics.requests import RequestLog
from quire.metrics.throughput import ThroughputLog

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class _Request:
    """A request of n sequences, until the last of them has ended."""

    n: int
    unfinished: int
    longest: int = 0  # tokens of its longest output


@dataclass(slots=True)
class _Sequence:
    """An unfinished sequence. Times are by time.monotonic(), and 0 for events that have not happened."""

    request: _Request
    num_prompt_tokens: int
    max_tokens: int
    arrived_at: float
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class EngineMetrics:
    """Counts requests, and the tokens and other results of steps. Times are taken in the process of the core's client.

    prefix: the prefix of the metrics' names. enabled: False keeps and renders no statistics.
    """

    def __init__(
        self, prefix: str, model_name: str, request_log: RequestLog | None = None, enabled: bool = True
    ) -> None:
        self.registry = CollectorRegistry()
        self.enabled = enabled
        self._prefix = prefix
        self._request_log = request_log or RequestLog(enabled=False)
        self._throughput = ThroughputLog()
        self._sequences: dict[str, _Sequence] = {}  # by core request id
        self._before = CoreStats()
        self._cache_config: Gauge | None = None
        labels = {"model_name": model_name, "engine": "0"}

        def gauge(name: str, text: str, **extra: str) -> Gauge:
            names = [*labels, *extra]
            return Gauge(f"{prefix}:{name}", text, names, registry=self.registry).labels(**labels, **extra)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, list(labels), registry=self.registry).labels(**labels)

        def counters(name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
            parent = Counter(f"{prefix}:{name}", text, [*labels, label], registry=self.registry)
            return {value: parent.labels(**labels, **{label: value}) for value in values}

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            parent = Histogram(f"{prefix}:{name}", text, list(labels), registry=self.registry, buckets=tuple(buckets))
            return parent.labels(**labels)

        self.running = gauge("num_requests_running", "Sequences that have a row in the batch")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for a row or for blocks")
        self.waiting_for_capacity = gauge(
            "num_requests_waiting_by_reason", "Sequences that wait, by the reason for it", reason="capacity"
        )
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1")
        self.preemptions = counter("num_preemptions", "Times that a sequence lost its blocks to another")
        self.queries = counter("prefix_cache_queries", "Tokens that were looked up in the prefix cache")
        self.hits = counter("prefix_cache_hits", "Tokens that were found in the prefix cache")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences with a first token")
        self.prompt_sources = counters(
            "prompt_tokens_by_source", "These prompt tokens, by where their keys and values came from",
            "source", ("local_compute", "local_cache_hit"),
        )  # fmt: skip
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache")
        self.generated = counter("generation_tokens", "Tokens generated")
        self.finished = counters(
            "request_success", "Sequences that ended, by reason", "finished_reason", [r.value for r in FinishReason]
        )
        self.drafts = counter("spec_decode_num_drafts", "Times that drafts of a sequence were verified")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens that were drafted")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were accepted, by place"
        accepted_at = Counter(f"{prefix}:{name}", text, [*labels, "position"], registry=self.registry)
        self.accepted_at = partial(accepted_at.labels, **labels)
        self.iteration = histogram(
            "iteration_tokens_total", "Tokens of a step: prompt tokens computed, and tokens generated", _STEP_TOKENS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a finished sequence", _TOKENS)
        self.computed_length = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a finished sequence that were not cached", _TOKENS
        )
        self.output_length = histogram("request_generation_tokens", "Generated tokens of a finished sequence", _TOKENS)
        self.longest_output = histogram(
            "request_max_num_generation_tokens", "Generated tokens of a finished request's longest sequence", _TOKENS
        )
        self.params_n = histogram("request_params_n", "The parameter n of a finished request", (1, 2, 5, 10, 20))
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The parameter max_tokens of a finished sequence", _TOKENS
        )
        self.times_preempted = histogram(
            "request_num_preemptions", "Times that a finished sequence was preempted", (0, 1, 2, 3, 4, 5, 10, 20)
        )
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", _SHORT)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a sequence", _SHORT)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a finished sequence's tokens but the first", _SHORT
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token", _LONG)
        self.queue = histogram("request_queue_time_seconds", "From arrival to a row in the batch", _LONG)
        self.prefill = histogram("request_prefill_time_seconds", "From a row to the first token", _LONG)
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last", _LONG)
        self.inference = histogram("request_inference_time_seconds", "From a row to the last token", _LONG)

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """Report options and size of the KV cache as labels of a gauge that is 1. The names must always be the same."""
        labels = {name: str(value) for name, value in config.items()}
        if self._cache_config is None:
            name, text = f"{self._prefix}:cache_config_info", "Options and size of the KV cache"
            self._cache_config = Gauge(name, text, [*labels, "engine"], registry=self.registry)
        self._cache_config.clear()
        self._cache_config.labels(**labels, engine="0").set(1)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry) if self.enabled else b""

    # ---- events

    def add(self, sequences: list[EngineCoreRequest]) -> None:
        """A request arrived. It has one core request for each of its n sequences."""
        if not self.enabled:
            return
        if not self._sequences:
            self._throughput.begin_work()
        request = _Request(len(sequences), len(sequences))
        for core_request in sequences:
            num_prompt_tokens, max_tokens = len(core_request.prompt_token_ids), core_request.max_tokens
            sequence = _Sequence(request, num_prompt_tokens, max_tokens, core_request.arrival_time)
            self._sequences[core_request.request_id] = sequence

    def abort(self, request_ids: list[str]) -> None:
        """The client aborted these core requests."""
        for request_id in request_ids:
            self._finish(request_id, "abort")

    def stop(self, request_ids: list[str]) -> None:
        """A stop string ended these core requests."""
        for request_id in request_ids:
            self._finish(request_id, "stop")

    def step(self, outputs: list[EngineCoreOutput], stats: CoreStats) -> None:
        """A step has finished. stats: the core's state right after the step."""
        if not self.enabled:
            return
        now, generated, first_tokens = time.monotonic(), 0, 0
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            if output.new_token_ids:
                generated += len(output.new_token_ids)
                first_tokens += not sequence.first_token_at
                self._advance(sequence, output, now)
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason.value)
        self._count(stats, generated, first_tokens)

    # ---- counting

    def _advance(self, sequence: _Sequence, output: EngineCoreOutput, now: float) -> None:
        if not sequence.first_token_at:
            cached, computed = output.num_cached_tokens, sequence.num_prompt_tokens - output.num_cached_tokens
            sequence.scheduled_at = output.scheduled_at or now
            sequence.first_token_at = now
            sequence.num_cached_tokens = cached
            self.first_token.observe(now - sequence.arrived_at)
            self.queue.observe(max(0.0, sequence.scheduled_at - sequence.arrived_at))
            self.prefill.observe(max(0.0, now - sequence.scheduled_at))
            self.prompt_tokens.inc(sequence.num_prompt_tokens)
            self.cached_tokens.inc(cached)
            self.prompt_sources["local_cache_hit"].inc(cached)
            self.prompt_sources["local_compute"].inc(computed)
        else:
            self.inter_token.observe(now - sequence.last_token_at)
        sequence.last_token_at = now
        sequence.num_tokens += len(output.new_token_ids)
        sequence.num_preemptions = output.num_preemptions

    def _finish(self, request_id: str, reason: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if not self._sequences:
            self._throughput.end_work()
        now = time.monotonic()
        self.finished[reason].inc()
        self.end_to_end.observe(now - sequence.arrived_at)
        self.prompt_length.observe(sequence.num_prompt_tokens)
        self.output_length.observe(sequence.num_tokens)
        self.params_max_tokens.observe(sequence.max_tokens)
        self.times_preempted.observe(sequence.num_preemptions)
        first, last = sequence.first_token_at, sequence.last_token_at
        if first:
            self.computed_length.observe(sequence.num_prompt_tokens - sequence.num_cached_tokens)
            self.decode.observe(last - first)
            self.inference.observe(max(0.0, last - sequence.scheduled_at))
            if sequence.num_tokens > 1:
                self.per_token.observe((last - first) / (sequence.num_tokens - 1))
        request = sequence.request
        request.longest = max(request.longest, sequence.num_tokens)
        request.unfinished -= 1
        if not request.unfinished:
            self.params_n.observe(request.n)
            self.longest_output.observe(request.longest)
        self._request_log.ended(
            request_id, reason, sequence.num_prompt_tokens, sequence.num_cached_tokens, sequence.num_tokens,
            first - sequence.arrived_at if first else None, now - sequence.arrived_at,
        )  # fmt: skip

    def _count(self, stats: CoreStats, generated: int, first_tokens: int) -> None:
        """Add the changes since the last step. A new core counts from zero, and the metrics continue."""
        before = self._before if stats.computed_tokens >= self._before.computed_tokens else CoreStats()
        queries, hits = stats.prefix_queries - before.prefix_queries, stats.prefix_hits - before.prefix_hits
        # A sequence's last token is generated but never computed, so a sequence has one token more than were computed.
        step_tokens = stats.computed_tokens - before.computed_tokens + first_tokens
        if step_tokens:
            self.iteration.observe(step_tokens)
            self.generated.inc(generated)
        if stats.speculation is not None:
            self._count_drafts(stats.speculation, before.speculation or SpeculationStats())
        self.preemptions.inc(stats.preemptions - before.preemptions)
        self.queries.inc(queries)
        self.hits.inc(hits)
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.waiting_for_capacity.set(stats.num_waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        self._before = stats
        self._throughput.step(stats, max(0, step_tokens - generated), generated, queries, hits)

    def _count_drafts(self, stats: SpeculationStats, before: SpeculationStats) -> None:
        self.drafts.inc(stats.drafts - before.drafts)
        self.draft_tokens.inc(stats.draft_tokens - before.draft_tokens)
        self.accepted_tokens.inc(stats.accepted_tokens - before.accepted_tokens)
        for place, (after, earlier) in enumerate(zip_longest(stats.accepted_at, before.accepted_at, fillvalue=0)):
            self.accepted_at(position=str(place)).inc(after - earlier)
