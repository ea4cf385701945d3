"""Requests go to the server whose cache has the longest beginning of their prompts, as its KV events say."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from typing import Any

import msgspec
import pytest

from quire.config.engine import ConfigError
from quire.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from quire.router.call import Call
from quire.router.config import RouteConfig
from quire.router.prefix_index import CachedPrefixes
from support.route import Proxy
from support.server import request
from support.server_process import Server
from support.waiting import eventually

PATH = "/v1/chat/completions"
SIZE = 4
CACHED: dict[str, Any] = {"policy": "cached", "kv_events": ("tcp://a:1",)}
TEXT = "Once upon a time there was a fox who lived near a river and told stories to everyone. " * 6


def call(tokens: list[int], **fields: Any) -> Call:
    made = Call("POST", "/v1/completions", [], json.dumps(fields).encode(), "a")
    made.tokens = tokens
    return made


def stored(
    names: list[Any],
    parent: Any,
    tokens: list[int],
    salt: str | None = None,
    lora: str | None = None,
    group: int | None = None,
) -> BlockStored:
    return BlockStored(names, parent, tokens, SIZE, None, "GPU", lora, None if salt is None else [(salt,)], group)


def best(index: CachedPrefixes, request: Call, servers: int = 3) -> list[int]:
    return index.longest(index.pieces(request), list(range(servers)))


def test_the_longest_prefix_counts_and_salts_and_adapters_are_apart():
    index = CachedPrefixes(range(3))
    text = list(range(20))
    index.apply(0, KVEventBatch(0.0, [stored([1], None, text[:4])]))
    index.apply(1, KVEventBatch(0.0, [stored([b"a", b"b"], None, text[:8]), stored([b"c"], b"b", text[8:12])]))
    index.apply(
        2, KVEventBatch(0.0, [stored([5], None, text[:4], salt="s"), stored([6], None, text[:4], lora="rhyme")])
    )
    assert best(index, call(text)) == [1]
    assert best(index, call([*text[:4], 99, 99, 99, 99])) == [0, 1]
    assert best(index, call(text, cache_salt="s")) == [2]
    assert best(index, call(text, model="rhyme")) == [2]
    assert best(index, call(text, model="other")) == [1]
    assert best(index, call([7] * 20)) == [0, 1, 2]
    assert best(index, call([])) == [0, 1, 2]
    index.apply(1, KVEventBatch(0.0, [BlockRemoved([b"b"], "GPU"), stored([7], None, text[4:8], group=1)]))
    assert best(index, call(text)) == [0, 1]
    index.apply(1, KVEventBatch(0.0, [AllBlocksCleared()]))
    assert best(index, call(text)) == [0]
    index.forget(0)
    assert not [prefix for prefix, bits in index._cores.items() if bits & 3]


@pytest.mark.parametrize("seed", range(5))
def test_random_events_against_sets_of_prefixes(seed):
    dice, index = random.Random(seed), CachedPrefixes(range(3))
    has: list[dict[int, tuple[int, ...]]] = [{} for _ in range(3)]
    for number in range(400):
        server = dice.randrange(3)
        known = has[server]
        if dice.random() < 0.6:
            parent = dice.choice([None, *known])
            before = () if parent is None else known[parent]
            tokens = [dice.randrange(2) for _ in range(SIZE)]
            if len(before) < 20 and (*before, *tokens) not in known.values():
                known[number] = (*before, *tokens)
                event: Any = stored([number], parent, tokens)
                index.apply(server, msgspec.convert(KVEventBatch(0.0, [event]), KVEventBatch))
        elif known:
            gone = dice.choice(list(known))
            del known[gone]
            index.apply(server, KVEventBatch(0.0, [BlockRemoved([gone], "GPU")]))
        text = [dice.randrange(2) for _ in range(16)]
        found = [0] * 3
        for i, texts in enumerate(has):
            while found[i] < 16 and tuple(text[: found[i] + SIZE]) in texts.values():
                found[i] += SIZE
        assert best(index, call(text)) == [i for i in range(3) if found[i] == max(found)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "cached"}, "an address for each backend"),
        ({"kv_events": ("tcp://a:1",)}, "an address for each backend"),
        ({"policy": "cached", "kv_events": ("tcp://a:1", "tcp://a:2")}, "an address for each backend"),
        ({"policy": "cached", "kv_events": ("tcp://a:1,a:2",)}, "kv_events must be tcp://HOST:PORT .*, got 'a:2'"),
        ({"kv_events_replay": ("tcp://a:1",)}, "kv_events_replay needs an address for each one of kv_events"),
        ({**CACHED, "kv_events_replay": ("tcp://a:2", "tcp://a:3")}, "kv_events_replay needs an address for each one"),
        ({**CACHED, "kv_events_replay": ("tcp://a:2,tcp://a:3",)}, "kv_events_replay needs an address for each one"),
        ({**CACHED, "kv_events_replay": ("a:2",)}, "kv_events_replay must be tcp://HOST:PORT .*, got 'a:2'"),
    ],
)
def test_addresses_and_servers_must_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        RouteConfig(backend=("http://127.0.0.1:8001",), **options)


def test_streams_have_the_numbers_of_their_servers_and_their_own_replay():
    options: dict[str, Any] = {"backend": ("http://a:1", "http://b:1"), "policy": "cached"}
    events, replays = ("tcp://a:2,tcp://a:3", "ipc://b"), ("tcp://a:4,tcp://a:5", "ipc://c")
    streams = RouteConfig(**options, kv_events=events, kv_events_replay=replays).streams
    assert streams == [(0, "tcp://a:2", "tcp://a:4"), (0, "tcp://a:3", "tcp://a:5"), (1, "ipc://b", "ipc://c")]
    streams = RouteConfig(**options, kv_events=events).streams
    assert streams == [(0, "tcp://a:2", None), (0, "tcp://a:3", None), (1, "ipc://b", None)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_real_servers_get_what_they_have_cached():
    ports = [free_port() for _ in range(4)]

    def server(port: int, replay_port: int) -> Server:
        addresses = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port}"}
        events = {"enable_kv_cache_events": True, **addresses}
        return Server(
            "--max-model-len",
            "1024",
            "--num-gpu-blocks-override",
            "300",
            "--served-model-name",
            "small",
            "--kv-events-config",
            json.dumps(events),
        )

    with server(*ports[::2]) as one, server(*ports[1::2]) as two:
        endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        options = ("--policy", "cached", "--kv-events", *endpoints[:2])
        with Proxy(one.url, two.url, options=options) as proxy:
            proxy.wait_for_backends(2)
            for own, other in ((one, two), (two, one)):
                chat = heard_of(proxy, own)
                before, others = own.metric("prefix_cache_hits_total"), other.metric("prompt_tokens_total")
                for number in range(6):
                    turn = [*chat, {"role": "assistant", "content": f"{number}?"}]
                    assert proxy.post(PATH, {"model": "small", "messages": turn, "max_tokens": 1}).status == 200
                assert own.metric("prefix_cache_hits_total") > before + 6 * 80
                assert other.metric("prompt_tokens_total") == others
        earlier = [(*pair, begin_chat(pair[0], number)) for number in range(1, 5) for pair in ((one, two), (two, one))]
        with Proxy(one.url, two.url, options=(*options, "--kv-events-replay", *endpoints[2:])) as proxy:
            proxy.wait_for_backends(2)
            for server in (one, two):  # it has asked for what came before their events
                heard_of(proxy, server)
            for own, other, body in earlier:
                before, others = own.metric("prefix_cache_hits_total"), other.metric("prompt_tokens_total")
                assert proxy.post(PATH, body).status == 200
                assert own.metric("prefix_cache_hits_total") > before + 80
                assert other.metric("prompt_tokens_total") == others


def begin_chat(server: Server, number: int) -> dict[str, Any]:
    """The body of a request that was sent to the server itself."""
    chat = [{"role": "user", "content": f"{server.url} {number}: {TEXT}"}]
    body = {"model": "small", "messages": chat, "max_tokens": 1}
    content = json.dumps(body).encode()
    assert request(server.url, "POST", PATH, content, Content_Type="application/json").status == 200
    return body


def heard_of(proxy: Proxy, server: Server) -> list[dict[str, str]]:
    """A chat that was sent to the server itself, and of which its events have told the proxy. Subscriptions may begin
    late, so several are tried. Without events, one of two requests would go to the other server."""
    numbers = itertools.count()

    def tried() -> list[dict[str, str]]:
        body = begin_chat(server, -next(numbers))
        time.sleep(0.1)
        before = server.metric("prefix_cache_hits_total")
        for _ in range(2):
            assert proxy.post(PATH, body).status == 200
        return list(body["messages"]) if server.metric("prefix_cache_hits_total") > before + 2 * 80 else []

    return eventually(tried, "an event of the server")
