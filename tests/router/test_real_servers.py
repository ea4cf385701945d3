"""`quire route` in front of two real servers with the bundled model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection, IncompleteRead
from typing import Any

import openai
import pytest

from support.route import Proxy
from support.server import Answer, eventually, request
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

LONG = {"prompt": "Once upon a time", "max_tokens": 1800, "ignore_eos": True, "temperature": 0}
STORY = "The king and the queen lived by the sea, and every morning they went for a walk. " * 8


class Servers:
    """Two servers, the second one replaceable."""

    def __init__(self) -> None:
        options = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16")
        self.start = lambda port="0": Server(*options, "--port", port)
        with ThreadPoolExecutor(2) as pool:
            self.all = list(pool.map(self.start, ["0", "0"]))

    def running(self) -> list[float]:
        return [server.metric("num_requests_running") for server in self.all]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    with ExitStack() as stack:
        for server in servers.all:
            stack.enter_context(server)
            server.process.terminate()  # both at once


@pytest.fixture(scope="module")
def proxy(servers: Servers) -> Iterator[Proxy]:
    options = ("--policy", "prefix", "--session-header", "X-Session-ID")
    with Proxy(*(server.url for server in servers.all), options=options) as proxy:
        yield proxy


def begin(proxy: Proxy, body: Any, **headers: str) -> HTTPConnection:
    """A connection on which a request for a completion was sent."""
    connection = HTTPConnection(*proxy.host_and_port, timeout=LONGEST)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection


def post(url: str, path: str, body: Any, **headers: str) -> Answer:
    return request(url, "POST", path, json.dumps(body).encode(), Content_Type="application/json", **headers)


def without_times(events: list[Any]) -> list[Any]:
    return [{**event, "created": 0} for event in events]


def test_streams_and_answers_are_those_of_a_server(servers: Servers, proxy: Proxy):
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 40, "logprobs": True, "seed": 1}
    for stream in (True, False):
        asked = {**body, "stream": stream}
        direct = post(servers.all[0].url, "/v1/chat/completions", asked, X_Request_Id="same")
        routed = post(proxy.url, "/v1/chat/completions", asked, X_Request_Id="same")
        assert (routed.status, set(routed.headers)) == (direct.status, set(direct.headers))
        if stream:
            assert len(routed.events) > 10
            assert without_times(routed.events) == without_times(direct.events)
        else:
            assert without_times([routed.json])[0]["choices"] == without_times([direct.json])[0]["choices"]
        assert routed.headers["x-request-id"] == "same"


def test_openais_client_and_the_other_paths(servers: Servers, proxy: Proxy):
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        chunks = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=10, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].text for chunk in chunks)
        whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=10, temperature=0)
        assert streamed == whole.choices[0].text != ""
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model=model, prompt="a", max_tokens=-1)
    for path in ("/v1/models", "/version", "/openapi.json", "/nowhere"):
        direct = request(servers.all[0].url, "GET", path)
        routed = request(proxy.url, "GET", path)
        assert routed.status == direct.status
        assert routed.headers["content-type"] == direct.headers["content-type"]


def test_a_conversation_finds_its_cached_prefix(servers: Servers, proxy: Proxy):
    """An odd number of conversations, so that servers that take turns would get each in turn."""
    conversations = [[{"role": "user", "content": f"{number} {STORY}"}] for number in range(5)]
    for turn in range(3):
        for messages in conversations:
            body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = post(proxy.url, "/v1/chat/completions", body).json
            usage = answer["usage"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            before = usage["prompt_tokens"] - 60  # a turn adds fewer tokens
            assert (cached > before) == (turn > 0), (turn, usage)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    queries = [server.metric("prefix_cache_queries_total") for server in servers.all]
    assert all(queries), "one server got all conversations"


def test_sessions_are_divided_among_the_servers(servers: Servers, proxy: Proxy):
    def answered() -> list[float]:
        return [proxy.counted("requests_total", backend=server.url) for server in servers.all]

    homes = []
    for number in range(8):
        before = answered()
        for _ in range(3):
            body = {"prompt": "a", "max_tokens": 1}
            assert post(proxy.url, "/v1/completions", body, X_Session_ID=f"session {number}").status == 200
        homes.append([after - count for after, count in zip(answered(), before, strict=True)])
    assert {tuple(home) for home in homes} == {(3, 0), (0, 3)}


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_end_their_requests(servers: Servers, proxy: Proxy, stream):
    connections = [begin(proxy, {**LONG, "stream": stream}) for _ in range(4)]
    try:
        eventually(lambda: sum(servers.running()) == 4)
    finally:
        for connection in connections:
            connection.close()
    eventually(lambda: sum(servers.running()) == 0)
    eventually(lambda: proxy.counted("requests_in_flight") == 0)


@pytest.mark.slow
def test_requests_of_a_server_that_is_killed_are_answered_by_the_other(servers: Servers, proxy: Proxy):
    """Those that wait for an answer are sent again; a stream ends, without its last event. The server comes back."""
    body = {**LONG, "max_tokens": 500}
    expected = post(servers.all[0].url, "/v1/completions", body).json["choices"]
    lost, port = servers.all[1], servers.all[1].url.rsplit(":")[-1]
    session = next(str(number) for number in range(100) if _home(proxy, servers, str(number)) == 1)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(post, proxy.url, "/v1/completions", body, X_Session_ID=session) for _ in range(3)]
        response = begin(proxy, {**LONG, "stream": True}, **{"X-Session-ID": session}).getresponse()
        first = response.readline()
        eventually(lambda: servers.running()[1] == 4)
        lost.process.send_signal(signal.SIGKILL)
        lost.process.wait()
        answers = [future.result() for future in waiting]
    assert first.startswith(b"data: ")
    assert [answer.json["choices"] for answer in answers] == [expected] * 3
    with pytest.raises(IncompleteRead):
        response.read()
    assert post(proxy.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}, X_Session_ID=session).status == 200
    assert proxy.counted("retries_total", backend=lost.url, reason="lost") >= 3
    servers.all[1] = servers.start(port)
    proxy.wait_for_backends(2)
    assert _home(proxy, servers, session) == 1


def _home(proxy: Proxy, servers: Servers, session: str) -> int:
    """The number of the server to which a session goes."""
    before = [proxy.counted("requests_total", backend=server.url) for server in servers.all]
    post(proxy.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}, X_Session_ID=session)
    after = [proxy.counted("requests_total", backend=server.url) for server in servers.all]
    return next(number for number in range(2) if after[number] > before[number])
