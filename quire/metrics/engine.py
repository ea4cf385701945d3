"""What an engine does, as Prometheus metrics with vLLM's names, and as log lines."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.messages.engine import CoreStats, EngineCoreOutput, EngineCoreRequest
from quire.metrics.logging import logger

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LOG_SECONDS = 10.0


@dataclass(slots=True)
class _Progress:
    """A sequence on its way; times of time.monotonic(), 0 for what has not happened."""

    num_prompt_tokens: int
    arrived_at: float
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0


class EngineMetrics:
    """Counts what requests ask and what steps bring. Times are taken where the client of the core sees them."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._progress: dict[str, _Progress] = {}  # by core request id
        self._before = CoreStats()
        labels = {"model_name": model_name, "engine": "0"}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}:{name}", text, list(labels), registry=self.registry).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, list(labels), registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, list(labels), registry=self.registry, buckets=tuple(buckets))
            return made.labels(**labels)

        self.running = gauge("num_requests_running", "Sequences that have a row in the batch")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for a row or for blocks")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1")
        self.preemptions = counter("num_preemptions", "Times that a sequence lost its blocks to another")
        self.queries = counter("prefix_cache_queries", "Tokens that were looked up in the prefix cache")
        self.hits = counter("prefix_cache_hits", "Tokens whose keys and values were found there")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences that began to answer")
        self.generated = counter("generation_tokens", "Tokens generated")
        self.iteration = histogram("iteration_tokens_total", "Tokens generated in a step", _TOKENS)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a finished sequence", _TOKENS)
        self.output_length = histogram("request_generation_tokens", "Generated tokens of a finished sequence", _TOKENS)
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
        finished = Counter(
            f"{prefix}:request_success", "Sequences that ended, by reason", [*labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.finished = {
            reason: finished.labels(**labels, finished_reason=reason) for reason in ("stop", "length", "abort", "error")
        }
        self._logged_at, self._logged = time.monotonic(), (0, 0)
        self._totals = [0, 0]  # prompt tokens, generated tokens

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    # ---- events

    def add(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self._progress[request.request_id] = _Progress(len(request.prompt_token_ids), request.arrival_time)

    def abort(self, request_ids: list[str]) -> None:
        """The client went away."""
        for request_id in request_ids:
            self._finish(request_id, "abort")

    def stop(self, request_ids: list[str]) -> None:
        """A stop string ended them."""
        for request_id in request_ids:
            self._finish(request_id, "stop")

    def step(self, outputs: list[EngineCoreOutput], stats: CoreStats) -> None:
        now, generated = time.monotonic(), 0
        for output in outputs:
            progress = self._progress.get(output.request_id)
            if progress is None:
                continue
            if output.new_token_ids:
                generated += len(output.new_token_ids)
                self._advance(progress, output, now)
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason.value)
        if generated:
            self.generated.inc(generated)
            self.iteration.observe(generated)
            self._totals[1] += generated
        self._count(stats)
        if now - self._logged_at > LOG_SECONDS:
            self._log(now, stats)

    # ---- how

    def _advance(self, progress: _Progress, output: EngineCoreOutput, now: float) -> None:
        if not progress.first_token_at:
            progress.scheduled_at = output.scheduled_at or now
            progress.first_token_at = now
            progress.num_cached_tokens = output.num_cached_tokens
            self.first_token.observe(now - progress.arrived_at)
            self.queue.observe(max(0.0, progress.scheduled_at - progress.arrived_at))
            self.prefill.observe(max(0.0, now - progress.scheduled_at))
            self.prompt_tokens.inc(progress.num_prompt_tokens)
            self._totals[0] += progress.num_prompt_tokens
        else:
            self.inter_token.observe(now - progress.last_token_at)
        progress.last_token_at = now
        progress.num_tokens += len(output.new_token_ids)

    def _finish(self, request_id: str, reason: str) -> None:
        progress = self._progress.pop(request_id, None)
        if progress is None:
            return
        now = time.monotonic()
        self.finished[reason].inc()
        self.end_to_end.observe(now - progress.arrived_at)
        self.prompt_length.observe(progress.num_prompt_tokens)
        self.output_length.observe(progress.num_tokens)
        first, last = progress.first_token_at, progress.last_token_at
        if first:
            self.decode.observe(last - first)
            self.inference.observe(max(0.0, last - progress.scheduled_at))
            if progress.num_tokens > 1:
                self.per_token.observe((last - first) / (progress.num_tokens - 1))
        logger.info(
            "Request %s ended (%s): %d prompt tokens (%d cached), %d generated; %s, %.2f s in all",
            request_id, reason, progress.num_prompt_tokens, progress.num_cached_tokens, progress.num_tokens,
            f"first token after {first - progress.arrived_at:.3f} s" if first else "no token",
            now - progress.arrived_at,
        )  # fmt: skip

    def _count(self, stats: CoreStats) -> None:
        """A core counts since it started; metrics go on over cores."""
        before = self._before if stats.prefix_queries >= self._before.prefix_queries else CoreStats()
        self.preemptions.inc(max(0, stats.preemptions - before.preemptions))
        self.queries.inc(stats.prefix_queries - before.prefix_queries)
        self.hits.inc(max(0, stats.prefix_hits - before.prefix_hits))
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        self._before = stats

    def _log(self, now: float, stats: CoreStats) -> None:
        seconds, (prompt, generated) = now - self._logged_at, self._logged
        self._logged_at, self._logged = now, (self._totals[0], self._totals[1])
        hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        logger.info(
            "Running %d, waiting %d, KV cache %.1f %%, prefix hits %.1f %%; prompts %.1f tok/s, output %.1f tok/s",
            stats.num_running, stats.num_waiting, 100 * stats.kv_cache_usage, 100 * hits,
            (self._totals[0] - prompt) / seconds, (self._totals[1] - generated) / seconds,
        )  # fmt: skip
