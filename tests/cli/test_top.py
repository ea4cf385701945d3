"""What `quire top` makes of a server's events and metrics, and how it draws that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.cli.main import main
from quire.cli.watch.picture import EventReader, MetricsReader, Picture
from quire.cli.watch.screen import draw

URL = "http://127.0.0.1:8000"


def view(**changes: Any) -> dict[str, Any]:
    """What a core tells at first."""
    request = {"id": "cmpl-1", "state": "running", "computed": 30, "prompt": 20, "known": 31, "most": 60}
    usual = {
        "time": 1.0,
        "num_blocks": 100,
        "block_size": 16,
        "blocks_per_cell": 1,
        "num_free": 75,
        "cells": [{"start": 0, "states": "0123" * 25}],
        "requests": [request],
        "num_running": 1,
        "num_waiting": 2,
        "steps": [{"id": 7, "requests": 1, "prompt": 20, "ms": {"schedule": 0.5, "wait": 1.5}}],
        "rates": {"prompt": 10.0, "output": 40.0},
        "ttft": [10.0, 20.0, 30.0],
        "gaps": [1.0, 2.0, 3.0],
        "totals": {"preemptions": 3, "prefix_queries": 100, "prefix_hits": 25},
        "tiers": [],
    }
    return {**usual, **changes}


def event(*views: dict[str, Any], is_whole: bool = False) -> dict[str, Any]:
    return {"is_whole": is_whole, "state": "ready", "restarts": 1, "views": list(views)}


def drawn(picture: Picture | None, width: int = 80, height: int = 24, **feed: Any) -> list[str]:
    usual = {"picture": picture, "title": "Quire 1, demo", "problem": "", "lost_at": 0.0, "lock": threading.Lock()}
    return draw(SimpleNamespace(**{**usual, **feed}), URL, width, height).plain.split("\n")


def test_events_are_added_up_over_time_and_over_cores():
    reader = EventReader()
    reader.take(event(view(), view(gaps=[5.0, 6.0, 7.0], ttft=[]), is_whole=True))
    picture = reader.picture
    assert (picture.running, picture.waiting, picture.num_blocks, picture.preemptions) == (2, 4, 200, 6)
    assert (picture.kv_usage, picture.hit_rate, picture.restarts) == (0.25, 0.25, 1)
    assert (picture.first_token, picture.gaps) == ([10.0, 20.0, 30.0], [5.0, 6.0, 7.0])
    assert picture.cells == "0123" * 50
    assert len(picture.steps) == len(picture.requests) == 2
    later = view(cells=[{"start": 2, "states": "00"}, {"start": 98, "states": "99"}], steps=[], requests=[])
    reader.take(event(later, view(cells=[], steps=[], requests=[])))
    assert picture.cells == "0100" + "0123" * 23 + "0199" + "0123" * 25
    assert (len(picture.steps), picture.requests, list(picture.output)) == (2, [], [80.0, 80.0])
    reader.take(event(view()))  # a core is lost, and what the other tells is not whole
    assert len(picture.output) == 2
    reader.take(event(view(), is_whole=True))
    assert (picture.num_blocks, picture.cells, len(picture.steps)) == (100, "0123" * 25, 1)
    reader.take({"problem": "the engine has failed"})
    assert picture.state == "dead"


class Engine:
    """Metrics with the names of an engine's."""

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        labels: Any = {"labelnames": ["model_name", "engine"], "registry": self.registry}

        def metric(kind: Any, name: str, **options: Any) -> Any:
            return kind(f"{prefix}:{name}", "x", **labels, **options).labels("demo", "0")

        self.running, self.usage = metric(Gauge, "num_requests_running"), metric(Gauge, "kv_cache_usage_perc")
        self.generated = metric(Counter, "generation_tokens")
        self.first = metric(Histogram, "time_to_first_token_seconds", buckets=(0.1, 0.2, 0.4))

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_metrics_of_some_seconds_are_compared(prefix):
    engine, reader = Engine(prefix), MetricsReader()
    engine.generated.inc(1000)
    engine.first.observe(0.3)  # before anybody looked
    reader.take(engine.text, 10.0)
    assert (reader.picture.first_token, list(reader.picture.output)) == ((), [0.0])
    engine.running.set(3)
    engine.usage.set(0.5)
    engine.generated.inc(50)
    for _ in range(100):
        engine.first.observe(0.15)
    reader.take(engine.text, 12.0)
    picture = reader.picture
    assert (picture.running, picture.kv_usage, picture.output[-1]) == (3, 0.5, 25.0)
    assert picture.first_token == pytest.approx([150.0, 190.0, 199.0])
    assert picture.others["Model"] == "demo"
    for second in range(13, 30):
        reader.take(engine.text, float(second))
    assert (picture.first_token, picture.output[-1]) == ((), 0.0)  # nothing in the last ten seconds
    reader.take(Engine(prefix).text, 31.0)  # it was started again
    assert picture.output[-1] == 0.0


def test_other_metrics_are_refused():
    with pytest.raises(ValueError, match="not those of an engine"):
        MetricsReader().take("# TYPE up gauge\nup 1\n", 0.0)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 8), (200, 60), (20, 3)])
@pytest.mark.parametrize("problem", ["", "Connection refused"])
def test_the_screen_fits(width, height, problem):
    reader = EventReader()
    requests = [{**view()["requests"][0], "id": f"cmpl-{i}" * 9, "preemptions": 1234, "cached": 5} for i in range(90)]
    reader.take(event(view(requests=requests), is_whole=True))
    lines = drawn(reader.picture, width, height, problem=problem)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[-1] == "q leaves"


def test_the_screen_says_it_all():
    reader = EventReader()
    reader.take(event(view(), is_whole=True))
    text = "\n".join(drawn(reader.picture))
    for said in (
        "Quire 1, demo",
        URL,
        " ready",
        "1 running",
        "2 waiting",
        "3 preemptions",
        "1 restarts",
        "25.0 % of 100 blocks",
        "25.0 % of tokens cached",
        "40.0 tokens/s",
        "50 % 10.0 ms",
        "99 % 3.0 ms",
        "2.0 ms: schedule 0.5",
        "1 requests: 20 prompt",
        "cmpl-1",
        "30/60",
        "·▒██",
    ):
        assert said in text, said
    lost = drawn(reader.picture, problem="Connection refused")
    assert lost[0].rstrip().endswith("lost")
    assert "Connection refused. Trying again." in lost[1]
    assert f"Waiting for {URL}: Connection refused" in "\n".join(drawn(None, problem="Connection refused"))


def test_nothing_that_a_client_names_can_change_the_terminal():
    reader = EventReader()
    reader.take(event(view(requests=[{**view()["requests"][0], "id": "a\x1b[2Jb\nc"}]), is_whole=True))
    lines = drawn(reader.picture)
    assert len(lines) == 24
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("url", "message"), [("ftp://x", "URL must be that of a server"), ("127.0.0.1:1", "needs a terminal")]
)
def test_what_cannot_be_shown_is_an_error(capsys, url, message):
    assert main(["top", url]) == 1
    assert message in capsys.readouterr().err
