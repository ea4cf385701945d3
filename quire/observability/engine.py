"""An engine's statistics, as Prometheus metrics with vLLM's names and as log lines."""

import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import lt
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from quire.messages.engine import CoreStats, EngineCoreOutput, EngineCoreRequest, FinishReason, SpeculationStats
from quire.observability.exposition import are_shared, exposition
from quire.observability.requests import RequestRecord, SequenceRecord
from quire.observability.throughput import ThroughputLog

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_Gauge = partial(Gauge, multiprocess_mode="mostrecent")  # one API process sets them


class EngineMetrics:
    """Counts requests, and the tokens and other results of steps. Times are taken in the process of the cores' client.

    prefix: the prefix of the metrics' names. enabled: False keeps and renders no statistics. max_loras: how many
    adapters a batch may have; 0 without adapters. num_cores: each core has its own metrics, with its number as the
    label `engine`. first_core: the number of the first. counts_cores: False if another client counts the cores'
    activity for all clients. since_start: False if this process replaces another one whose cores have already run.
    buckets: the bounds of histograms by family, which replace those in engine.toml.
    """

    def __init__(
        self,
        prefix: str,
        model_name: str,
        enabled: bool = True,
        max_loras: int = 0,
        num_cores: int = 1,
        counts_cores: bool = True,
        since_start: bool = True,
        first_core: int = 0,
        buckets: Mapping[str, Sequence[float]] = {},
    ) -> None:
        self.registry = CollectorRegistry()
        self.enabled = enabled
        self._prefix = prefix
        self._throughput = ThroughputLog()
        self._sequences: dict[str, SequenceRecord] = {}  # by core request id
        self._counts_cores = counts_cores
        self._first_core = first_core
        self._stats = [CoreStats() if since_start else None for _ in range(num_cores)]  # the last of each core
        self._cache_config: Gauge | None = None
        self._cache_labels: list[dict[str, str]] = []
        # For each core: its metrics by name, or by name and the value of an additional label.
        self._cores: list[dict[Any, Any]] = [{} for _ in range(num_cores)]

        def declare(kind: Any, name: str, text: str, **options: Any) -> None:
            metric = kind(f"{prefix}:{name}", text, ["model_name", "engine"], registry=self.registry, **options)
            for rank, core in enumerate(self._cores, first_core):
                core[name] = metric.labels(model_name, str(rank))

        def declare_labelled(kind: Any, name: str, text: str, label: str, values: Iterable[str]) -> None:
            metric = kind(f"{prefix}:{name}", text, ["model_name", "engine", label], registry=self.registry)
            for rank, core in enumerate(self._cores, first_core):
                core[name] = partial(metric.labels, model_name, str(rank))
                core.update({(name, value): core[name](value) for value in values})

        for kind, group in ((_Gauge, "gauges"), (Counter, "counters")):
            for name, text in _TABLES[group].items():
                declare(kind, name, text)
        for table in _TABLES["histograms"]:
            for name, text in table["metrics"].items():
                declare(Histogram, name, text, buckets=buckets.get(table["family"], table["buckets"]))
        text = "Sequences that wait, by the reason for it"
        declare_labelled(_Gauge, "num_requests_waiting_by_reason", text, "reason", ["capacity"])
        text = "These prompt tokens, by where their keys and values came from"
        declare_labelled(Counter, "prompt_tokens_by_source", text, "source", ["local_compute", "local_cache_hit"])
        declare_labelled(Counter, "request_success", "Sequences that ended, by reason", "finished_reason", FinishReason)
        text = "Drafted tokens that were accepted, by place"
        declare_labelled(Counter, "spec_decode_num_accepted_tokens_per_pos", text, "position", [])
        self._adapters: Gauge | None = None
        if max_loras and not are_shared():
            name = f"{prefix}:lora_requests_info"
            text = "The time; its labels name the adapters of unfinished sequences"
            names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
            self._max_loras, self._adapters = str(max_loras), Gauge(name, text, names, registry=self.registry)

    def set_cache_config(self, configs: Sequence[Mapping[str, object]]) -> None:
        """Report the options and sizes of the cores' KV caches as labels of a gauge that is 1. The label names must
        never change."""
        labels = [
            {**{n: str(v) for n, v in c.items()}, "engine": str(rank)}
            for rank, c in enumerate(configs, self._first_core)
        ]
        if self._cache_config is None:
            name = f"{self._prefix}:cache_config_info"
            text = "Options and size of the KV cache"
            self._cache_config = _Gauge(name, text, [*labels[0]], registry=self.registry)
        elif labels != self._cache_labels:
            self._cache_config.clear()
        self._cache_labels = labels
        for of_core in labels:
            self._cache_config.labels(**of_core).set(1)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._report_adapters()
        return exposition(self.registry) if self.enabled else b""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this process."""
        self._report_adapters()
        return self.registry.collect() if self.enabled else ()

    def _report_adapters(self) -> None:
        if self._adapters is None:
            return
        found: tuple[set[str], set[str]] = set(), set()  # before the first token, after it
        for sequence in self._sequences.values():
            found[bool(sequence.first_token_at)].add(sequence.adapter)
        self._adapters.clear()
        names = (",".join(sorted(some - {""})) for some in found)
        self._adapters.labels(self._max_loras, *names).set_to_current_time()

    # ---- events

    def add(self, sequences: list[EngineCoreRequest], core_of: Callable[[str], int] = lambda request_id: 0) -> None:
        """Record a new request. It has one core request for each of its n sequences. core_of: returns the core of a
        request."""
        if not self.enabled:
            return
        if not self._sequences:
            self._throughput.begin_work()
        request = RequestRecord(len(sequences), len(sequences))
        for core_request in sequences:
            num_prompt_tokens = len(core_request.prompt_token_ids)
            max_tokens = core_request.max_tokens
            adapter = core_request.adapter.name if core_request.adapter else ""
            request_id = core_request.request_id
            core = core_of(core_request.request_id)
            self._sequences[request_id] = SequenceRecord(
                request, num_prompt_tokens, max_tokens, core_request.arrival_time, adapter, core
            )

    def abort(self, request_ids: list[str]) -> None:
        """Record that the client aborted these core requests."""
        for request_id in request_ids:
            self._finish(request_id, "abort")

    def stop(self, request_ids: list[str]) -> None:
        """Record that a stop string ended these core requests."""
        for request_id in request_ids:
            self._finish(request_id, "stop")

    def step(self, outputs: list[EngineCoreOutput], stats: CoreStats, core: int = 0) -> None:
        """Record a core's finished step. stats: its state right after the step."""
        if not self.enabled:
            return
        now = time.monotonic()
        generated = 0
        first_tokens = 0
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            if output.new_token_ids:
                generated += len(output.new_token_ids)
                first_tokens += not sequence.first_token_at
                sequence.core = core
                self._advance(sequence, output, now)
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason.value)
        self._count(core, stats, generated, first_tokens)

    def count_restart(self, core: int) -> None:
        """Record that a new core replaces a lost one."""
        if self._counts_cores:
            self._cores[core]["engine_restarts"].inc()

    # ---- counting

    def _advance(self, sequence: SequenceRecord, output: EngineCoreOutput, now: float) -> None:
        metrics = self._cores[sequence.core]
        if not sequence.first_token_at:
            cached = output.num_cached_tokens
            computed = sequence.num_prompt_tokens - output.num_cached_tokens
            sequence.scheduled_at = output.scheduled_at or now
            sequence.first_token_at = now
            sequence.num_cached_tokens = cached
            metrics["time_to_first_token_seconds"].observe(now - sequence.arrived_at)
            metrics["request_queue_time_seconds"].observe(max(0.0, sequence.scheduled_at - sequence.arrived_at))
            metrics["request_prefill_time_seconds"].observe(max(0.0, now - sequence.scheduled_at))
            metrics["prompt_tokens"].inc(sequence.num_prompt_tokens)
            metrics["prompt_tokens_cached"].inc(cached)
            metrics["prompt_tokens_by_source", "local_cache_hit"].inc(cached)
            metrics["prompt_tokens_by_source", "local_compute"].inc(computed)
        else:
            metrics["inter_token_latency_seconds"].observe(now - sequence.last_token_at)
        sequence.last_token_at = now
        sequence.num_tokens += len(output.new_token_ids)
        sequence.num_preemptions = output.num_preemptions

    def _finish(self, request_id: str, reason: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if not self._sequences and not are_shared():
            self._throughput.end_work()
        now = time.monotonic()
        metrics = self._cores[sequence.core]
        metrics["request_success", reason].inc()
        metrics["e2e_request_latency_seconds"].observe(now - sequence.arrived_at)
        metrics["request_prompt_tokens"].observe(sequence.num_prompt_tokens)
        metrics["request_generation_tokens"].observe(sequence.num_tokens)
        metrics["request_params_max_tokens"].observe(sequence.max_tokens)
        metrics["request_num_preemptions"].observe(sequence.num_preemptions)
        first = sequence.first_token_at
        last = sequence.last_token_at
        if first:
            metrics["request_prefill_kv_computed_tokens"].observe(
                sequence.num_prompt_tokens - sequence.num_cached_tokens
            )
            metrics["request_decode_time_seconds"].observe(last - first)
            metrics["request_inference_time_seconds"].observe(max(0.0, last - sequence.scheduled_at))
            if sequence.num_tokens > 1:
                metrics["request_time_per_output_token_seconds"].observe((last - first) / (sequence.num_tokens - 1))
        request = sequence.request
        request.longest = max(request.longest, sequence.num_tokens)
        request.unfinished -= 1
        if not request.unfinished:
            metrics["request_params_n"].observe(request.n)
            metrics["request_max_num_generation_tokens"].observe(request.longest)

    def _count(self, core: int, stats: CoreStats, generated: int, first_tokens: int) -> None:
        """Add the changes since the last step. A new core counts from zero, but the metrics continue."""
        metrics = self._cores[core]
        before = self._stats[core] or stats
        metrics["generation_tokens"].inc(generated)
        if not self._counts_cores:
            return
        if _is_of_new_core(stats, before):
            before = CoreStats()
        queries = stats.prefix_queries - before.prefix_queries
        hits = stats.prefix_hits - before.prefix_hits
        # A sequence's last token is generated but never computed, so a sequence has one more token than were computed.
        step_tokens = stats.computed_tokens - before.computed_tokens + first_tokens
        if step_tokens:
            metrics["iteration_tokens_total"].observe(step_tokens)
        if stats.speculation is not None:
            _count_drafts(metrics, stats.speculation, before.speculation or SpeculationStats())
        metrics["num_preemptions"].inc(stats.preemptions - before.preemptions)
        metrics["prefix_cache_queries"].inc(queries)
        metrics["prefix_cache_hits"].inc(hits)
        metrics["external_prefix_cache_queries"].inc(stats.external_queries - before.external_queries)
        metrics["external_prefix_cache_hits"].inc(stats.external_hits - before.external_hits)
        metrics["num_requests_running"].set(stats.num_running)
        metrics["num_requests_waiting"].set(stats.num_waiting)
        metrics["num_requests_waiting_by_reason", "capacity"].set(stats.num_waiting)
        metrics["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        self._stats[core] = stats
        total = CoreStats.total([stats or CoreStats() for stats in self._stats])
        is_busy = total.num_running + total.num_waiting > 0
        if are_shared() and is_busy:  # with requests of other processes
            self._throughput.begin_work()
        generated = stats.generated_tokens - before.generated_tokens  # for all clients
        computed = max(0, step_tokens - generated)
        preemptions = stats.preemptions - before.preemptions
        self._throughput.step(total, computed, generated, queries, hits, preemptions)
        if are_shared() and not is_busy:
            self._throughput.end_work()


def _is_of_new_core(stats: CoreStats, before: CoreStats) -> bool:
    """Whether a core's counts are lower than before, so that it must be a new core."""
    drafts = stats.speculation
    earlier = before.speculation
    return (
        stats.computed_tokens < before.computed_tokens
        or stats.prefix_queries < before.prefix_queries
        or stats.prefix_hits < before.prefix_hits
        or stats.external_queries < before.external_queries
        or stats.external_hits < before.external_hits
        or stats.preemptions < before.preemptions
        or (drafts is not None and earlier is not None and any(map(lt, drafts.counts, earlier.counts)))
    )


def _count_drafts(metrics: dict[Any, Any], stats: SpeculationStats, before: SpeculationStats) -> None:
    metrics["spec_decode_num_drafts"].inc(stats.drafts - before.drafts)
    metrics["spec_decode_num_draft_tokens"].inc(stats.draft_tokens - before.draft_tokens)
    metrics["spec_decode_num_accepted_tokens"].inc(stats.accepted_tokens - before.accepted_tokens)
    for place, (after, earlier) in enumerate(zip_longest(stats.accepted_at, before.accepted_at, fillvalue=0)):
        metrics["spec_decode_num_accepted_tokens_per_pos"](str(place)).inc(after - earlier)
