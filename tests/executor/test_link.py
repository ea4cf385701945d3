"""What the executor and a rank say to each other, and how they know each other."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from quire.config.engine import ConfigError, EngineConfig
from quire.executor import link as links
from quire.executor.link import Link
from quire.executor.messages import Order, Start, encode
from quire.observability.logging import LogOptions
from quire.parallel.sizes import MeshSizes
from quire.sampling.logits_processors import LogitsProcessor, load_plugins
from support.faults import Faults
from support.waiting import LONGEST

KEY = bytes(range(32))


def connected(executor_key: bytes = KEY, rank_key: bytes = KEY) -> tuple[Link, Link]:
    """Both ends of a connection. Raises what the executor's end, or else the rank's, raises."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        executor = pool.submit(lambda: Link(listener.accept()[0], executor_key, b"executor"))
        rank = pool.submit(Link.connect, *listener.getsockname(), rank_key)
        assert (executor.exception() is None) == (rank.exception() is None), "one end trusts the other"
        return executor.result(), rank.result()


@pytest.mark.parametrize("size", [0, 1, 100_000, 10_000_000])
def test_messages_of_any_size_arrive_whole_and_in_order(size):
    executor, rank = connected()
    messages = [bytes([i]) * size for i in range(3)] + [b"end"]
    sender = threading.Thread(target=lambda: [executor.send(message) for message in messages])
    sender.start()
    assert [rank.receive() for _ in messages] == messages
    sender.join()
    rank.send(b"back")
    assert executor.receive() == b"back"


def test_threads_that_send_at_once_do_not_mix_their_messages():
    executor, rank = connected()
    messages = [bytes([i]) * (1 + 50_000 * i) for i in range(8)]
    with ThreadPoolExecutor(len(messages)) as pool:
        for message in messages:
            pool.submit(executor.send, message)
        assert sorted(rank.receive() for _ in messages) == messages


def test_ends_with_different_keys_do_not_speak():
    with pytest.raises(ConnectionError, match="does not know the key"):
        connected(rank_key=bytes(32))


def test_an_end_that_repeats_the_others_words_is_not_taken_for_one_that_knows_the_key():
    """Each end proves the key for its own role, so an answer cannot be had from the one who asks."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        executor = pool.submit(lambda: Link(listener.accept()[0], KEY, b"executor"))
        with socket.create_connection(listener.getsockname()) as echo:
            while piece := echo.recv(1 << 16):
                echo.sendall(piece)
        with pytest.raises(ConnectionError, match="does not know the key"):
            executor.result()


@pytest.mark.parametrize("said", [b"", b"\0" * 7, b"GET / HTTP/1.1\r\n\r\n"])
def test_somebody_who_connects_and_says_nothing_of_use_is_dropped(monkeypatch, said):
    monkeypatch.setattr(links, "_GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        other.sendall(said)
        with pytest.raises(OSError):  # noqa: PT011  # of several kinds
            Link(listener.accept()[0], KEY, b"executor")


def test_silence_is_an_error_and_a_word_in_time_is_not():
    executor, rank = connected()
    rank.expect_within(0.2)
    with pytest.raises(BlockingIOError):
        rank.receive()
    executor.send(b"late")
    assert rank.receive() == b"late"


def test_closing_wakes_both_ends():
    executor, rank = connected()
    executor.expect_within(LONGEST)
    rank.expect_within(LONGEST)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(executor.receive), pool.submit(rank.receive)]
        rank.close()
        for end in waiting:
            assert isinstance(end.exception(LONGEST), OSError)
    with pytest.raises(OSError):  # noqa: PT011
        rank.send(b"gone")


def start(**options: Any) -> Start:
    return Start(
        EngineConfig.create(**options),
        "/some/model",
        128,
        MeshSizes(tp=2),
        "127.0.0.1:1",
        1,
        LogOptions(),
        (0, 2),
        [0, 0],
    )


def test_a_configuration_arrives_as_it_was():
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 7,
        "kernels": {"rms_norm": "reference"},
        "max_model_len": -1,
        "hf_overrides": {"rope_scaling": {"factor": 2.0, "names": ["a", None]}},
        "async_scheduling": True,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": "4G",
        "logits_processors": ["support.faults:Faults"],
    }
    for sent in (start(), start(**options)):
        received = msgspec.msgpack.decode(encode(sent), type=Order)
        assert received == sent


def test_classes_of_logits_processors_travel_by_name():
    received = msgspec.msgpack.decode(encode(start(logits_processors=[Faults])), type=Order)
    assert isinstance(received, Start)
    assert received.config.sampling.logits_processors == ["support.faults:Faults"]
    assert load_plugins(received.config.sampling.logits_processors) == [Faults]


def test_a_class_that_ranks_cannot_import_is_an_error_that_says_what_to_do(monkeypatch):
    class Local(LogitsProcessor):
        pass

    with pytest.raises(ConfigError, match=r"cannot import .*Local, which is defined in a function; put it into a mod"):
        encode(start(logits_processors=[Local]))
    monkeypatch.setattr(Faults, "__module__", "__main__")
    with pytest.raises(ConfigError, match="cannot import Faults, which is defined in the main program"):
        encode(start(logits_processors=[Faults]))


def test_an_option_that_is_no_data_is_an_error_that_shows_it():
    with pytest.raises(
        ConfigError, match=r"<object object at .*> cannot be sent to the processes that share the model"
    ):
        encode(start(hf_overrides={"x": object()}))
