"""keep_alive of Ollama's API: an idle engine sleeps, and the next request wakes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from quire.config.engine import ServerConfig
from quire.server.keep_alive import KeepAlive
from quire.server.ollama.bodies import seconds_of
from support.server import Host, Service, eventually

GENERATION = {"model": "demo", "prompt": "Hello", "stream": False, "options": {"temperature": 0, "num_predict": 4}}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(dtype="float32", max_num_seqs=16, kv_cache_memory_bytes=64 << 20)
    yield host
    host.close()


@pytest.fixture
def admin(host: Host) -> Iterator[Service]:
    service = host.serve(enable_admin_api=True)
    yield service
    if sleeps(host):
        service.request("POST", "/wake_up")


def sleeps(host: Host) -> bool:
    return bool(host.run(host.llm.is_sleeping()))


def generate(service: Service, **fields) -> str:
    answer = service.post("/api/generate", {**GENERATION, **fields})
    assert answer.status == 200, answer.body
    return answer.json["response"]


def loaded(service: Service) -> list:
    return service.get("/api/ps").json["models"]


def unload(service: Service) -> None:
    answer = service.post("/api/generate", {"model": "demo", "keep_alive": 0}).json
    assert (answer["done"], answer["done_reason"]) == (True, "unload")


def test_an_unloaded_model_sleeps_until_the_next_request_of_any_api(admin, host: Host):
    expected = generate(admin)
    for again in (
        lambda: generate(admin),
        lambda: admin.complete("Hello", max_tokens=4),
        lambda: admin.post("/api/chat", {"model": "demo", "messages": []}),
    ):
        unload(admin)
        assert sleeps(host)
        assert loaded(admin) == []
        again()
        assert not sleeps(host)
        assert [model["name"] for model in loaded(admin)] == ["demo:latest"]
    assert generate(admin) == expected


def test_the_model_stays_loaded_for_as_long_as_the_last_request_says(admin, host: Host):
    generate(admin, keep_alive="10m")
    [model] = loaded(admin)
    remaining = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 500 < remaining <= 600
    for forever in ({"keep_alive": -1}, {"keep_alive": "-1m"}, {}):
        generate(admin, keep_alive="10m")
        generate(admin, **forever)
        assert datetime.fromisoformat(loaded(admin)[0]["expires_at"]).year == 9999
    generate(admin, keep_alive=0.05)
    eventually(lambda: sleeps(host))
    generate(admin, keep_alive=0)
    eventually(lambda: sleeps(host))
    generate(admin)
    assert not sleeps(host)


def test_requests_that_run_are_finished_before_the_model_is_unloaded(admin, host: Host):
    options = {"temperature": 0, "num_predict": 300, "stop": []}
    expected = generate(admin, raw=True, prompt="1 1 1 1 1 1 1 1 1 1", options=options)
    texts: list[str] = []
    thread = threading.Thread(
        target=lambda: texts.append(generate(admin, raw=True, prompt="1 1 1 1 1 1 1 1 1 1", options=options))
    )
    thread.start()
    eventually(lambda: host.llm.client.num_unfinished > 0 or texts)
    unload(admin)
    thread.join()
    assert texts == [expected]
    eventually(lambda: sleeps(host))


def test_many_requests_wake_the_engine_once(admin, host: Host):
    expected = generate(admin)
    texts: list[str] = []
    for _ in range(3):
        unload(admin)
        threads = [threading.Thread(target=lambda: texts.append(generate(admin))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [expected] * 12


def test_an_operator_decides_over_sleep_and_pause(admin, host: Host):
    assert admin.request("POST", "/pause?mode=keep").status == 200
    unload(admin)
    assert not sleeps(host)
    assert admin.request("POST", "/resume").status == 200
    generate(admin)
    unload(admin)
    assert admin.request("POST", "/wake_up").status == 200
    assert generate(admin)


def test_without_the_option_nothing_is_unloaded(host: Host):
    plain = host.serve()
    unload(plain)
    generate(plain, keep_alive=0)
    host.run(asyncio.sleep(0.1))
    assert not sleeps(host)
    assert loaded(plain)


def test_several_processes_keep_the_model_loaded(host: Host):
    keep_alive = KeepAlive(host.llm, ServerConfig(enable_admin_api=True, api_server_count=2))
    host.run(keep_alive.unload())
    assert keep_alive.expires_at is None
    assert not sleeps(host)


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        (0, 0),
        (2.5, 2.5),
        (-1, None),
        ("0", 0),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("500ms", 0.5),
        ("-1m", None),
        ("-1", None),
        ("+2s", 2),
    ],
)
def test_durations_are_read(keep_alive, seconds):
    assert seconds_of(keep_alive) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("keep_alive", ["", "m", "5 m", "5minutes", "1h-3m", "soon", "--1"])
def test_what_is_no_duration_is_refused(keep_alive):
    with pytest.raises(ValueError, match="5m or 1h30m"):
        seconds_of(keep_alive)
