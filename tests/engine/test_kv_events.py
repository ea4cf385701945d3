"""Events of the prefix cache, as subscribers get them. What they mean is tested in tests/scheduler, move by move."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.config.engine import ConfigError
from quire.config.kv_events import KVEventOptions, of_rank
from quire.engine.async_llm import AsyncLLM
from quire.engine.kv_events import KVEventPublisher
from quire.engine.llm import LLM
from quire.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.messages.sampling_params import SamplingParams
from support.client_environment import client_python
from support.kv_router import END, RouterView, Subscriber
from support.waiting import LONGEST, eventually

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 40}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def options(folder: Path, **fields: Any) -> dict[str, Any]:
    addresses = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    return {"enable_kv_cache_events": True, **addresses, **fields}


def subscriber(folder: Path, rank: int = 0, **fields: Any) -> Subscriber:
    return Subscriber(*(of_rank(f"ipc://{folder}/{name}", rank) for name in ("events", "replay")), **fields)


def stored(number: int) -> BlockStored:
    return BlockStored([number], None, [1, 2], 2, None, "GPU", None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def publisher_of(llm: LLM) -> KVEventPublisher:
    (listener,) = llm.core.scheduler.kv.pool.listeners
    publisher = listener._send.__self__
    assert isinstance(publisher, KVEventPublisher)
    return publisher


def cached(llm: LLM) -> set[tuple[int, int]]:
    return {(group, int.from_bytes(name[-8:])) for group, name in llm.core.scheduler.kv.pool._cached}


def test_a_late_subscriber_that_loses_messages_knows_in_the_end_what_the_cache_has(tmp_path):
    """Prompts share prefixes, the pool is too small for all of them, requests are aborted, the cache is reset."""
    llm = LLM(**SMALL, kv_events_config=options(tmp_path, topic="kv"))
    prompts = [[5 + i % 3] * 30 + list(range(10 + i, 60 + i)) for i in range(12)]
    llm.generate(prompts[:2], PARAMS, use_tqdm=False)
    publisher = publisher_of(llm)
    late = subscriber(tmp_path, topic="kv", forget=frozenset(range(0, 2000, 3)))
    eventually(lambda: (publisher.send([]), late.read(0.01), late.next)[-1], "the subscription")
    for prompt in prompts[2:8]:
        llm.generate([prompt], PARAMS, use_tqdm=False)
        eventually(lambda: (late.read(0.01), late.last == publisher._next - 1)[1], "the last message")
    llm.core.add_request(llm.processor.process("x", prompts[8], PARAMS).core_requests[0])
    llm.core.step()
    llm.core.abort_requests(["x"])
    assert late.num_replays > 1
    late.replay_to(publisher._next)  # the last one may have been lost, too
    assert late.view.blocks == cached(llm)
    assert late.view.blocks
    llm.reset_prefix_cache()
    late.replay_to(publisher._next)
    assert late.view.blocks == cached(llm) == set()
    llm.generate([{"prompt_token_ids": prompts[8], "cache_salt": "a"}, prompts[9]], PARAMS, use_tqdm=False)
    late.replay_to(publisher._next)
    assert late.view.blocks == cached(llm)
    assert {salt for _, salt, _ in late.view.texts.values()} == {None, "a"}
    assert late.view.ranks == {0}
    llm.shutdown()
    late.close()


def test_an_engine_without_the_option_has_no_listener():
    llm = LLM(**SMALL)
    assert llm.core.scheduler.kv.pool.listeners == []


def test_a_replay_begins_where_the_client_says_and_ends_with_a_mark(tmp_path):
    publisher = KVEventPublisher(KVEventOptions(**options(tmp_path, buffer_steps=3)), rank=0)
    for number in range(5):
        publisher.send([stored(number)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(f"ipc://{tmp_path}/replay")

        def replay(first: int) -> list[int]:
            client.send_multipart([b"", first.to_bytes(8)])
            numbers = []
            while (answer := client.recv_multipart()[1:]) != [END, b""]:
                numbers.append(int.from_bytes(answer[0]))
            return numbers

        eventually(lambda: replay(4) == [4])  # the publisher's thread has got them all
        for first, expected in ((0, [2, 3, 4]), (4, [4]), (9, [])):
            assert replay(first) == expected
    publisher.close()


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""]])
def test_a_request_for_a_replay_that_has_no_meaning_is_dropped(tmp_path, request_frames):
    publisher = KVEventPublisher(KVEventOptions(**options(tmp_path)), rank=0)
    publisher.send([AllBlocksCleared()])
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(f"ipc://{tmp_path}/replay")
        client.send_multipart(request_frames)
        client.send_multipart([b"", bytes(8)])
        assert client.recv_multipart()[1] == bytes(8)
        assert client.recv_multipart() == [b"", END, b""]
    publisher.close()


def test_a_subscriber_that_does_not_read_loses_batches_and_finds_them_by_a_replay(tmp_path):
    publisher = KVEventPublisher(KVEventOptions(**options(tmp_path, hwm=10)), rank=0)
    slow = subscriber(tmp_path)
    slow._public.set_hwm(10)
    eventually(lambda: (publisher.send([AllBlocksCleared()]), slow.read(0.01), slow.next)[-1], "the subscription")
    for number in range(3000):  # more than the sockets of both sides keep
        publisher.send([BlockStored([number], None, [7] * 2000, 2000, None, "GPU", None)])
    publisher.send([BlockRemoved([17], "GPU")])
    slow.replay_to(publisher._next)
    assert slow.view.blocks == {(0, number) for number in range(3000) if number != 17}
    publisher.close()
    slow.close()


def test_batches_that_the_thread_cannot_take_are_lost_and_their_numbers_are_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(KVEventPublisher, "_run", lambda self: None)
    publisher = KVEventPublisher(KVEventOptions(**options(tmp_path, max_queue_size=4)), rank=0)
    for number in range(20):
        publisher.send([stored(number)])
    assert caplog.text.count("KV events are lost") == 1
    assert publisher._next == 20
    publisher._context.destroy(linger=0)


def test_ports_follow_the_rank_and_only_what_the_user_names_is_open_to_others():
    assert KVEventOptions().endpoint == "tcp://127.0.0.1:5557"
    assert of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert of_rank("tcp://[::1]:5557", 0) == "tcp://[::1]:5557"
    assert [of_rank("ipc:///tmp/x", rank) for rank in (0, 1)] == ["ipc:///tmp/x", "ipc:///tmp/x_dp1"]
    binding = ("tcp://*:1", "tcp://[::]:1", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc://x")
    assert all(KVEventOptions(endpoint=endpoint).binds() for endpoint in binding)
    assert not any(KVEventOptions(endpoint=endpoint).binds() for endpoint in ("tcp://10.0.0.7:1", "tcp://router:1"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"endpoint": "tcp://here"}, "endpoint must be tcp://HOST:PORT"),
        ({"endpoint": "inproc://x"}, "endpoint must be tcp://HOST:PORT"),
        ({"replay_endpoint": "tcp://*:x"}, "replay_endpoint must be"),
        ({"publisher": "kafka"}, "publisher must be one of 'zmq', 'null'"),
        ({"hwm": 0}, "hwm must be at least 1"),
        ({"buffer_steps": "many"}, "buffer_steps must be of type int"),
        ({"topics": ""}, "has no field 'topics'"),
    ],
)
def test_wrong_fields_are_named(fields, problem):
    with pytest.raises(ConfigError, match=f"kv_events_config.*{problem}"):
        KVEventOptions.read({"enable_kv_cache_events": True, **fields})


def test_options_that_contradict_each_other_are_refused():
    assert KVEventOptions.read({"publisher": "null", "enable_kv_cache_events": True}) is None
    assert KVEventOptions.read({"enable_kv_cache_events": False}) is None
    with pytest.raises(ConfigError, match="leave enable_prefix_caching at true"):
        LLM(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fields = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(ConfigError, match="Address already in use"):
            LLM(**SMALL, kv_events_config=fields)


@pytest.mark.slow
def test_each_replica_publishes_at_an_address_of_its_own(tmp_path):
    async def check() -> None:
        llm = AsyncLLM(**SMALL, data_parallel_size=2, kv_events_config=options(tmp_path))
        await llm.start()
        followers = [subscriber(tmp_path, rank) for rank in range(2)]
        for i in range(4):
            async for _ in llm.generate([7 + i] * 64, PARAMS, f"{i}"):
                pass
        for rank, follower in enumerate(followers):
            eventually(
                lambda follower=follower: (follower.replay(), len(follower.view.blocks) >= 2 * (64 + 19) // 16)[1]
            )
            assert follower.view.ranks == {rank}
            assert len(follower.view.blocks) == 2 * (64 + 19) // 16
            follower.close()
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(check(), LONGEST))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_indexer_of_dynamo_knows_how_much_of_a_prompt_is_cached():
    """NVIDIA's router library, which reads vLLM's events: it is told of prompts, evictions and a reset, and misses the
    first events, which it has to ask for."""
    python = client_python("ai-dynamo-runtime>=1.3,<2")
    events, replay, http = free_port(), free_port(), free_port()
    addresses = {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    llm = LLM(**SMALL, kv_events_config={"enable_kv_cache_events": True, **addresses})
    process = subprocess.Popen([python, "-m", "dynamo.indexer", "--port", f"{http}"])
    prompts = [[9 + i] * 100 for i in range(8)]

    def post(path: str, **body: Any) -> Any:
        data = json.dumps({"model_name": "demo", **body}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{http}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LONGEST) as answer:
            return json.loads(answer.read())

    def found(token_ids: list[int]) -> int:
        """Tokens of the prompt that are cached, as the indexer has heard."""
        scores = post("/query", token_ids=token_ids)["scores"]
        return max((count for ranks in scores.values() for count in ranks.values()), default=0)

    def expect(counts: list[int]) -> None:
        eventually(
            lambda: [found(prompt) for prompt in prompts] == counts,
            lambda: f"{[found(prompt) for prompt in prompts]} instead of {counts}",
        )

    def registers() -> bool:
        try:
            post("/register", instance_id=1, block_size=16, **addresses)
        except OSError:
            return False
        return True

    def in_pool(token_ids: list[int]) -> int:
        request = llm.processor.process("x", [*token_ids, 3], PARAMS).core_requests[0]
        llm.core.add_request(request)
        hashes = llm.core.scheduler.requests["x"].block_hashes
        llm.core.scheduler.kv.admit(llm.core.scheduler.requests["x"])
        llm.core.scheduler.kv.free(llm.core.scheduler.requests["x"])
        llm.core.abort_requests(["x"])
        return 16 * len(llm.core.scheduler.kv.pool.lookup_all(0, hashes))

    try:
        llm.generate(prompts[:1], PARAMS, use_tqdm=False)
        eventually(registers)
        # What it hears of a batch makes it ask for the earlier ones, so its subscription is there.
        eventually(lambda: (publisher_of(llm).send([]), found(prompts[0]) == 96)[1])
        llm.generate(prompts[1:3], PARAMS, use_tqdm=False)
        expect([96, 96, 96, 0, 0, 0, 0, 0])
        for prompt in prompts[3:]:
            llm.generate([prompt], PARAMS, use_tqdm=False)
        counts = [in_pool(prompt) for prompt in prompts]
        assert 0 in counts
        assert 96 in counts
        expect(counts)
        llm.reset_prefix_cache()
        expect([0] * 8)
        llm.generate(prompts[:1], PARAMS, use_tqdm=False)
        expect([96] + [0] * 7)
    finally:
        process.terminate()
        process.wait()
        llm.shutdown()


def test_the_view_refuses_what_contradicts_it():
    """The referee of these tests is no rubber stamp."""
    view = RouterView()
    view._store([1], None, [1, 2], 2, None, "GPU", None, None, None)
    with pytest.raises(AssertionError, match="stored twice"):
        view._store([1], None, [1, 2], 2, None, "GPU", None, None, None)
    with pytest.raises(KeyError):
        view._remove([2], "GPU", None)
