"""Plans: loads that break objectives, costs, and what is recommended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_simulate import Constant, replica

from quire.bench.slo import parse
from quire.planner import report
from quire.planner.devices import DEVICES
from quire.planner.layout import Layout
from quire.planner.memory import EngineOptions
from quire.planner.plan import Load, Task, best_of, breaking_load, cost_of, load_of, plan, result_of
from quire.planner.simulate import simulate
from quire.planner.traffic import Traffic, read_traffic
from support.server import eventually

H100 = DEVICES["H100"]


def task(footprint: Any, traffic: str, **fields: Any) -> Task:
    made = read_traffic(traffic)
    options = EngineOptions(made.longest, 64, 2048)
    return Task(footprint, H100, options, None, made, **fields)


def test_latencies_and_goodput_are_those_of_the_requests():
    traffic = read_traffic("rate=0.01,input=10,output=5,requests=10")
    load = load_of(simulate(traffic, replica(), Constant()), traffic, parse("ttft=2s,itl=2s,tpot=2s,e2e=6s"), Layout())
    p = load.latencies.percentiles
    assert p["itl"][50.0] == p["tpot"][99.0] == 1.0
    assert 1.0 <= p["ttft"][50.0] < 2.0
    assert load.met
    assert load.latencies.good_share == 1.0
    assert load.output_tokens_per_second == pytest.approx(50 / load.seconds)
    missed = load_of(simulate(traffic, replica(), Constant()), traffic, parse("e2e=4s"), Layout())
    assert not missed.met
    assert missed.goodput == 0


@pytest.mark.slow
def test_the_breaking_load_is_what_rows_can_answer():
    """A replica answers 16 requests in 10 steps of a second each, so it bears 1.6 a second, and less than 1.7."""
    limits = parse("ttft=30s")

    def run(traffic: Traffic, latest: float = math.inf) -> Load:
        return load_of(
            simulate(traffic, replica(rows=16, tokens=1000), Constant(), latest=latest), traffic, limits, Layout()
        )

    traffic = read_traffic("rate=0.1,input=10,output=10,requests=600")
    found = breaking_load(traffic, limits, run)
    assert found is not None
    assert found.met
    assert 1.4 < found.rate < 1.8
    assert not run(traffic.at_rate(found.rate * 1.1)).met
    assert breaking_load(traffic.at_rate(50), limits, run).rate == pytest.approx(found.rate, rel=0.05)  # type: ignore[union-attr]


def test_no_load_meets_what_a_step_alone_exceeds():
    limits = parse("itl=900ms")

    def run(traffic: Traffic, latest: float) -> Load:
        return load_of(simulate(traffic, replica(), Constant(), latest=latest), traffic, limits, Layout())

    assert breaking_load(read_traffic("rate=1,input=10,output=10,requests=20"), limits, run) is None


def test_costs_are_prices_by_throughput(llama):
    load = result_of(task(llama, "rate=1,input=100,output=100,requests=20"), Layout()).load
    assert load is not None
    cost = cost_of(2.0, Layout(4), load)
    assert cost is not None
    assert cost.per_hour == 8.0
    assert cost.per_million_output_tokens == pytest.approx(8.0 / (load.output_tokens_per_second * 3600 / 1e6))
    assert cost.per_million_tokens == pytest.approx(cost.per_million_output_tokens / 2, rel=0.01)
    assert cost_of(None, Layout(), load) is None


def test_a_plan_compares_layouts(llama):
    made = task(llama, "rate=8,input=800,output=60,requests=60", limits=parse("ttft=400ms,itl=40ms"), price=2.0)
    results = list(plan(made, [Layout(dp=2), Layout(2)]))
    spread, divided = results
    assert all(result.load and result.load.met and result.breaking for result in results)
    assert divided.load.latencies.percentiles["itl"][50.0] < spread.load.latencies.percentiles["itl"][50.0]  # type: ignore[union-attr]
    best = best_of(results, made.limits)
    assert best in results
    assert best.breaking.rate == max(result.breaking.rate for result in results)  # type: ignore[union-attr]
    assert spread.needed in (1, 2)
    text = report.text(made, results)
    assert "What fits" in text
    assert "dp 2" in text
    assert f"quire serve {best.layout.flags}" in text  # type: ignore[union-attr]
    data = json.loads(json.dumps(report.as_json(made, results)))
    assert [layout["fits"] for layout in data["layouts"]] == [True, True]
    assert data["best"] == best.layout.flags  # type: ignore[union-attr]
    assert data["layouts"][0]["load"]["ttft"]["p99"] > 0


def test_without_limits_the_fastest_is_best(llama):
    made = task(llama, "rate=8,input=300,output=60,requests=30")
    results = list(plan(made, [Layout(dp=4), Layout(4), Layout(1, 4)]))
    best = best_of(results, made.limits)
    assert best is not None
    assert best.layout == Layout(4)
    assert "Take tp 4 (quire serve -tp 4)." in report.text(made, results)


def test_layouts_are_simulated_by_several_processes_alike(llama):
    made = task(llama, "rate=8,input=300,output=20,requests=30")
    assert list(plan(made, [Layout(dp=2), Layout(2)], 2)) == list(plan(made, [Layout(dp=2), Layout(2)]))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")
def test_processes_end_with_the_one_that_started_them():
    code = (
        "from quire.planner.plan import _end_with_parent\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "import os, time\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(2, get_context('spawn'), _end_with_parent) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        pool.submit(time.sleep, 600).result()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    eventually(lambda: state_of(child) in ("gone", "Z"))


def state_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def test_a_load_at_the_end_of_the_search_has_no_limit(llama):
    made = task(llama, "rate=0.001,input=10,output=2,requests=10", limits=parse("itl=100s"))
    (result,) = plan(made, [Layout()])
    assert result.breaking is not None
    assert "none up to here" in report.text(made, [result])


def test_what_does_not_fit_is_said(llama):
    made = replace(task(llama, "rate=8,input=300,output=20,requests=30"), device=replace(H100, memory=8e9))
    results = list(plan(made, [Layout()]))
    assert results[0].load is None
    assert best_of(results, made.limits) is None
    assert "Nothing fits" in report.text(made, results)
    assert "does not fit" in report.text(made, results)


def test_all_at_once_has_no_breaking_load(llama):
    made = task(llama, "rate=inf,input=300,output=20,requests=30", limits=parse("ttft=10s"))
    (result,) = plan(made, [Layout()])
    assert result.breaking is None
    assert result.load is not None
    assert "all at once" in report.text(made, [result])
    assert report.as_json(made, [result])["rate"] is None


def test_replicas_that_share_experts_are_simulated_together(mixture):
    made = task(mixture, "rate=20,input=200,output=20,requests=40", limits=parse("ttft=5s"))
    shared, tensor = plan(made, [Layout(1, 1, 2, True), Layout(2)])
    assert shared.load is not None
    assert tensor.load is not None
    assert shared.needed is None
    assert shared.memory.weights < 0.6 * task(mixture, "rate=1,input=1,output=1").memory(Layout()).weights
