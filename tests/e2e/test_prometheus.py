"""Prometheus scrapes a server that has traffic, and answers every query of documentation and dashboard.

Needs the programs `prometheus` and `promtool`, such as those of Debian's package prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import eventually, request
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="prometheus and promtool are not installed",
    ),
]
ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "docs").glob("*.md")
ALERTS = ROOT / "deploy" / "prometheus" / "quire-alerts.yml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "quire.json").read_text())
QUERIES = [
    query.strip()
    for document in sorted(DOCUMENTS)
    for query in re.findall(r"^```promql\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
]
# Grafana's variables, as they are when all servers and models are chosen.
VARIABLES = {"$instance": ".*", "$model": ".*", "$__rate_interval": "1m"}
PANELS = {
    f"{panel['title']} {target['refId']}": re.sub(r"\$\w+", lambda name: VARIABLES[name[0]], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
# What promtool says of names that vLLM gave, and that dashboards need.
KNOWN_COMPLAINTS = (
    "metric names should not contain ':'",
    'iteration_tokens_total non-counter metrics should not have "_total" suffix',
)
DRAFTS = {"model": "quire-demo/eagle3", "num_speculative_tokens": 3, "adaptive": False}
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{alerts}"]
scrape_configs:
- job_name: quire
  static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It speculates, so that there is an answer to the queries about drafts."""
    with Server("--max-num-seqs", "8", "--speculative-config", json.dumps(DRAFTS)) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server each second."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(CONFIG.format(target=server.url.removeprefix("http://"), alerts=ALERTS))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        eventually(lambda: _is_ready(process, f"http://{address}", folder / "log"))
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(LONGEST)


def _is_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return request(url, "GET", "/-/ready").status == 200
    except OSError:
        return False


def ask(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(
        f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=LONGEST
    ) as response:
        answer = json.load(response)
    assert answer["status"] == "success"
    return answer["data"]


def post(server: Server, path: str, **fields: Any) -> int:
    headers = {"Content-Type": "application/json"}
    return request(server.url, "POST", path, json.dumps(fields).encode(), **headers).status


def send_traffic(server: Server) -> None:
    prompt = "Once upon a time there was a little girl, and she lived in a wood with her mother and her father. " * 3
    for fields in ({}, {"stream": True}, {"n": 2, "temperature": 1}):
        assert post(server, "/v1/completions", prompt=prompt, max_tokens=8, **fields) == 200
    assert post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=8) == 200
    assert post(server, "/v1/completions", prompt="a", top_p=2) == 400
    assert post(server, "/v2/nothing") == 404


def scrapes(prometheus: str) -> int:
    """Number of scrapes that Prometheus knows, all of which succeeded."""
    (result,) = ask(prometheus, "query", query="count_over_time(up[1h])")["result"] or [{"value": [0, "0"]}]
    return int(result["value"][1])


@pytest.fixture(scope="module")
def watched(server: Server, prometheus: str) -> str:
    """Traffic before and after a scrape, so that rates have two points at least, and a scrape after it."""
    for _ in range(3):
        send_traffic(server)
        before = scrapes(prometheus)
        eventually(lambda before=before: scrapes(prometheus) >= before + 2)
    return prometheus


def test_prometheus_reads_all_that_it_scrapes(watched: str) -> None:
    (target,) = ask(watched, "targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    (lowest,) = ask(watched, "query", query="min_over_time(up[1h])")["result"]
    assert lowest["value"][1] == "1"
    metadata = ask(watched, "metadata")
    assert {kind["type"] for kind in metadata["quire:time_to_first_token_seconds"]} == {"histogram"}
    assert {kind["type"] for kind in metadata["http_requests_total"]} == {"counter"}


def test_there_are_queries_in_the_documentation() -> None:
    assert len(QUERIES) >= 10


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_documentation_has_an_answer(watched: str, query: str) -> None:
    data = ask(watched, "query", query=query)
    assert data["result"], "no series"
    for series in data["result"]:
        assert float(series["value"][1]) >= 0  # a number, and not NaN


@pytest.mark.parametrize("panel", PANELS)
def test_every_query_of_the_dashboard_has_an_answer(watched: str, panel: str) -> None:
    data = ask(watched, "query", query=PANELS[panel])
    assert data["result"], "no series"
    for series in data["result"]:
        value = float(series["value"][1])
        assert value >= 0 or "by (handler, le)" in PANELS[panel]  # of a path that had no request meanwhile


def test_the_variables_of_the_dashboard_have_values(watched: str) -> None:
    for variable in DASHBOARD["templating"]["list"][1:]:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()
        assert ask(watched, f"label/{label}/values", **{"match[]": selector})


def test_prometheus_evaluates_all_alerts_and_none_is_raised(watched: str) -> None:
    (group,) = ask(watched, "rules")["groups"]
    eventually(lambda: all(rule["health"] == "ok" for rule in ask(watched, "rules")["groups"][0]["rules"]))
    assert [rule["state"] for rule in group["rules"] if rule["state"] == "firing"] == []
    for rule in group["rules"]:
        names = set(re.findall(r"\b(?:quire:|http_|process_)\w+|\bup\b", rule["query"]))
        assert names
        for name in names:
            assert ask(watched, "query", query=name)["result"], name


def test_alerts_are_raised_when_they_should_be() -> None:
    for command in (["check", "rules", ALERTS], ["test", "rules", ALERTS.with_name("quire-alerts-tests.yml")]):
        done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rates_are_those_of_the_traffic(watched: str) -> None:
    def number(query: str) -> float:
        (series,) = ask(watched, "query", query=query)["result"]
        return float(series["value"][1])

    assert number("increase(quire:generation_tokens_total[5m])") > 0
    assert 0 < number("rate(quire:prefix_cache_hits_total[5m]) / rate(quire:prefix_cache_queries_total[5m])") <= 1
    refused = ask(watched, "query", query='http_requests_total{status="4xx"}')["result"]
    assert {(s["metric"]["handler"], s["value"][1]) for s in refused} == {("/v1/completions", "3"), ("none", "3")}


def test_promtool_has_no_complaints_but_those_about_names_of_vllms(watched: str, server: Server) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=server.get("/metrics")[1], capture_output=True, text=True
    )
    complaints = [line for line in done.stderr.splitlines() if not line.endswith(KNOWN_COMPLAINTS)]
    assert complaints == []
    assert done.returncode in (0, 3), done.stderr  # 3: there were complaints
