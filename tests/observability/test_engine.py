"""What EngineMetrics counts and logs, told of steps at known times."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.engine import ConfigError, EngineConfig
from quire.config.metrics import FAMILIES
from quire.messages.engine import CoreStats, EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.sampling_params import SamplingParams
from quire.observability import engine, throughput
from quire.observability.engine import EngineMetrics
from quire.observability.exposition import SHARED_FOLDER
from support.clock import Clock

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (engine, throughput):
        monkeypatch.setattr(module, "time", clock)
    return clock


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"quire:{name}", LABELS | labels)


def sequences(request_id: str, num_prompt_tokens: int, n: int = 1, max_tokens: int = 100) -> list[EngineCoreRequest]:
    params, prompt, now = SamplingParams(n=n), list(range(num_prompt_tokens)), engine.time.monotonic()
    return [
        EngineCoreRequest(f"{index}_{request_id}", prompt, params, 0, max_tokens, arrival_time=now)
        for index in range(n)
    ]


class Core:
    """Tells the metrics of steps, with counts that add up as a core's do."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.metrics, self.stats = metrics, CoreStats()

    def step(self, computed: int, *outputs: EngineCoreOutput) -> None:
        generated = sum(len(output.new_token_ids) for output in outputs)
        self.stats = CoreStats(
            num_running=1,
            computed_tokens=self.stats.computed_tokens + computed,
            generated_tokens=self.stats.generated_tokens + generated,
        )
        self.metrics.step(list(outputs), self.stats)


def test_a_steps_tokens_are_the_prompt_tokens_it_computed_and_those_it_generated(clock) -> None:
    metrics = EngineMetrics("quire", "m")
    core = Core(metrics)
    metrics.add(sequences("a", 1000))
    core.step(512)
    core.step(488, EngineCoreOutput("0_a", [7]))
    assert value(metrics, "iteration_tokens_total_sum") == 1001
    core.step(1, EngineCoreOutput("0_a", [8]))
    core.step(1, EngineCoreOutput("0_a", [9], FinishReason.LENGTH))
    assert value(metrics, "iteration_tokens_total_count") == 4
    assert value(metrics, "iteration_tokens_total_sum") == 1003
    assert value(metrics, "iteration_tokens_total_bucket", le="1.0") == 2
    assert value(metrics, "prompt_tokens_total") + value(metrics, "generation_tokens_total") == 1003


def test_tokens_that_arrive_in_one_step_are_one_event(clock) -> None:
    metrics = EngineMetrics("quire", "m")
    metrics.add(sequences("a", 10))
    core = Core(metrics)
    for tokens, reason in ([7], None), ([8, 9, 10], None), ([11, 12], FinishReason.LENGTH):
        clock.now += 1.0
        core.step(1, EngineCoreOutput("0_a", tokens, reason))
    found = [value(metrics, f"inter_token_latency_seconds_{part}") for part in ("count", "sum")]
    assert found == [2, 2.0]
    assert value(metrics, "request_time_per_output_token_seconds_sum") == pytest.approx(2.0 / 5)


def test_counters_go_on_and_gauges_are_zero_when_a_core_is_lost(clock) -> None:
    metrics = EngineMetrics("quire", "m")
    metrics.add(sequences("a", 10))
    before = CoreStats(num_running=1, kv_cache_usage=0.5, preemptions=2, prefix_queries=10, computed_tokens=10)
    metrics.step([EngineCoreOutput("0_a", [7])], before)
    metrics.step([], CoreStats())
    assert value(metrics, "num_requests_running") == value(metrics, "kv_cache_usage_perc") == 0
    metrics.step([EngineCoreOutput("0_a", [8])], CoreStats(preemptions=1, prefix_queries=11, computed_tokens=11))
    assert value(metrics, "num_preemptions_total") == 3
    assert value(metrics, "prefix_cache_queries_total") == 21
    assert value(metrics, "iteration_tokens_total_sum") == 22


@pytest.mark.parametrize("name", ["prefix_queries", "prefix_hits", "external_queries", "external_hits", "preemptions"])
def test_the_last_report_of_a_lost_core_may_come_late(name: str) -> None:
    metrics = EngineMetrics("quire", "m")
    metrics.step([], CoreStats())
    for stats in (CoreStats(**{name: 9}), CoreStats(computed_tokens=5, **{name: 4}), CoreStats(computed_tokens=6)):
        metrics.step([], stats)
    assert value(metrics, "iteration_tokens_total_sum") >= 6


def test_parameters_are_counted_when_a_request_ends(clock) -> None:
    metrics = EngineMetrics("quire", "m")
    metrics.add(sequences("a", 20, n=3, max_tokens=40))
    outputs = [EngineCoreOutput(f"{i}_a", [1] * (i + 1), num_cached_tokens=16 * (i > 0)) for i in range(3)]
    outputs[1].num_preemptions = 2
    Core(metrics).step(20, *outputs)
    metrics.stop(["0_a", "2_a"])
    assert value(metrics, "request_params_n_count") == 0
    metrics.abort(["1_a"])
    assert (value(metrics, "request_params_n_count"), value(metrics, "request_params_n_sum")) == (1, 3)
    assert value(metrics, "request_params_max_tokens_sum") == 3 * 40
    assert value(metrics, "request_max_num_generation_tokens_count") == 1
    assert value(metrics, "request_max_num_generation_tokens_sum") == 3
    assert (value(metrics, "request_num_preemptions_count"), value(metrics, "request_num_preemptions_sum")) == (3, 2)
    assert value(metrics, "request_prefill_kv_computed_tokens_sum") == 20 + 4 + 4
    assert value(metrics, "prompt_tokens_by_source_total", source="local_compute") == 28
    assert value(metrics, "prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert value(metrics, "prompt_tokens_cached_total") == 32
    assert value(metrics, "request_success_total", finished_reason="stop") == 2
    assert value(metrics, "request_success_total", finished_reason="abort") == 1


def test_the_documented_names_are_those_of_the_metrics() -> None:
    metrics = EngineMetrics("quire", "m", max_loras=1)
    metrics.set_cache_config([{"block_size": 16}])
    families = list(text_string_to_metric_families(metrics.render().decode()))
    shown = {
        (family.name.removeprefix("quire:") + ("_total" if family.type == "counter" else ""), family.type)
        for family in families
        if not family.name.endswith("_created")
    }
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| (\w+) \|", DOCUMENT.read_text().split("\n## HTTP")[0], re.MULTILINE)
    assert set(rows) == shown
    assert len(rows) == len(shown)


def test_without_statistics_nothing_is_counted_or_shown() -> None:
    metrics = EngineMetrics("quire", "m", enabled=False)
    metrics.add(sequences("a", 10))
    Core(metrics).step(10, EngineCoreOutput("0_a", [7], FinishReason.STOP))
    assert metrics.render() == b""
    assert value(metrics, "generation_tokens_total") == 0


# ---- the periodic line


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "quire"]


def work(clock: Clock, core: Core, request_id: str, seconds: int) -> None:
    """A request of 100 prompt tokens that generates 10 tokens, in steps of a tenth of its time each."""
    core.metrics.add(sequences(request_id, 100))
    for index in range(10):
        clock.now += seconds / 10
        reason = FinishReason.LENGTH if index == 9 else None
        core.step(1 if index else 100, EngineCoreOutput(f"0_{request_id}", [1], reason))


def test_rates_in_the_log_leave_idle_time_out(clock, caplog) -> None:
    caplog.set_level("INFO", "quire")
    core = Core(EngineMetrics("quire", "m"))
    work(clock, core, "a", 5)
    clock.now += 1000  # idle
    assert lines(caplog) == []
    work(clock, core, "b", 5)
    (line,) = lines(caplog)
    # At b's first step: two prompts and 11 tokens in 5.5 s of work.
    assert "computed 36.4 prompt tokens/s, generated 2.0 tokens/s in 5.5 s of work" in line


def test_with_several_api_processes_the_first_logs_what_the_cores_do_for_all(
    clock, caplog, monkeypatch, tmp_path
) -> None:
    caplog.set_level("INFO", "quire")
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path))
    first, second = (EngineMetrics("quire", "m", counts_cores=i == 0) for i in range(2))
    stats = CoreStats(num_running=1)
    for _ in range(2):
        for _ in range(6):  # steps that take 2 s, for a client of the second process
            clock.now += 2
            stats = msgspec.structs.replace(
                stats, computed_tokens=stats.computed_tokens + 110, generated_tokens=stats.generated_tokens + 10
            )
            first.step([], stats)
            second.step([], stats)
        stats.num_running = 0
        first.step([], stats)
        clock.now += 100  # idle
        stats.num_running = 1
    assert len(lines(caplog)) == 2
    assert all("Running 1, waiting 0" in line for line in lines(caplog))
    assert "generated 6.0 tokens/s in 10.0 s of work" in lines(caplog)[0]


def test_a_busy_engine_logs_every_ten_seconds_and_an_idle_one_not_at_all(clock, caplog) -> None:
    caplog.set_level("INFO", "quire")
    core = Core(EngineMetrics("quire", "m"))
    clock.now += 500
    work(clock, core, "a", 40)
    assert len(lines(caplog)) == 3  # after 12, 24 and 36 s
    assert all("generated 0.2 tokens/s" in line for line in lines(caplog))
    before = len(lines(caplog))
    for _ in range(100):
        clock.now += 5
        core.step(0)
    assert len(lines(caplog)) <= before + 1  # what the last 4 s brought


def test_the_bounds_of_a_family_can_be_others():
    metrics = EngineMetrics("quire", "m", buckets={"request_latency": [0.5, 2], "request_tokens": [7]})
    text = metrics.render().decode()

    def bounds(name: str) -> list[str]:
        return re.findall(rf'^quire:{name}_bucket{{.*le="(.*?)".*}}', text, re.MULTILINE)

    assert bounds("e2e_request_latency_seconds") == bounds("request_queue_time_seconds") == ["0.5", "2.0", "+Inf"]
    assert bounds("request_prompt_tokens") == ["7.0", "+Inf"]
    assert len(bounds("time_to_first_token_seconds")) > 10
    assert {table["family"] for table in engine._TABLES["histograms"]} == set(FAMILIES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"latency": [1]}, "has no family 'latency'; it has request_latency, time_to_first_token"),
        ({"request_latency": []}, "request_latency must be a list of ascending numbers above 0"),
        ({"request_latency": [2, 1]}, "ascending"),
        ({"request_latency": [0, 1]}, "ascending"),
        ({"request_latency": ["1"]}, "ascending"),
    ],
)
def test_wrong_bounds_are_named(given, message):
    with pytest.raises(ConfigError, match=f"^custom_histogram_buckets.*{message}"):
        EngineConfig.create(custom_histogram_buckets=given)
