"""Blocks that ranks of one engine read from ranks of another, over real sockets and shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from quire.messages.transfers import Peer, Transfer
from quire.transfer import server as server_module
from quire.transfer import wire
from quire.transfer.messages import Describe, Hello, Problem, Read
from quire.transfer.sources import TcpSource, _answers, ask
from quire.worker.kv_transfer import WHOLE
from support.kv_peers import GQA, LATENTS, NAME, SECRET, WINDOWS, Consumer, CopiedRows, Make, ModelModel
from support.waiting import LONGEST, eventually


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
@pytest.mark.parametrize("model", [GQA, LATENTS, WINDOWS], ids=["gqa", "latents", "windows"])
@pytest.mark.parametrize(("theirs", "ours"), [((1, 1), (1, 1)), ((2, 2), (1, 1)), ((1, 1), (4, 1)), ((4, 1), (2, 2))])
def test_blocks_arrive_whole(
    make: Make, transport: str, model: ModelModel, theirs: tuple[int, int], ours: tuple[int, int]
) -> None:
    shared = transport == "shared_memory"
    producer, consumer = make(model, theirs, ours, {"shared": shared}, transports=[transport])
    for seed in range(2):
        order = producer.order(seed)
        assert consumer.load(order) == [[]] * len(consumer.stores)
        consumer.check(order)
        for blocks in consumer.blocks:
            blocks.zero_()


@pytest.mark.parametrize("blocks_in_buffer", [1, 3, 100])
def test_blocks_of_devices_go_through_buffers(
    make: Make, monkeypatch: pytest.MonkeyPatch, blocks_in_buffer: int
) -> None:
    monkeypatch.setattr(server_module, "BUFFER_BYTES", blocks_in_buffer * GQA.layout(0, 2, 0, 2).block_bytes)
    producer, consumer = make(GQA, (2, 2), (1, 1), {"rows": CopiedRows}, rows=CopiedRows)
    order = producer.order()
    assert consumer.load(order) == [[]]
    consumer.check(order)


def test_long_transfers_are_divided(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.transfer.sources._BATCH_BLOCKS", 2)
    monkeypatch.setattr("quire.transfer.wire._IOV_MAX", 3)
    producer, consumer = make(GQA, (1, 1), (2, 1), streams=3)
    order = producer.order(count=11)
    assert consumer.load(order) == [[], []]
    consumer.check(order)


def test_without_an_option_the_best_transport_is_taken(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for shared, transport in ((True, "shared_memory"), (False, "tcp")):
        producer, consumer = make(producer={"shared": shared})
        order = producer.order()
        assert consumer.load(order) == [[]]
        consumer.check(order)
        assert caplog.messages[-1] == f"KV blocks of the engine at 127.0.0.1 are read by {transport}"


def test_a_file_of_another_process_is_not_mistaken_for_the_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.transfer.store._REST_SECONDS", 0.0)
    producer, consumer = make(producer={"shared": True}, transports=["shared_memory"])
    hello = producer.servers[0]._hello
    assert hello.file is not None
    with (tmp_path / "other").open("wb") as other:
        changed = {"handle": other.fileno()}, {"boot_id": "another"}, {"inode": hello.file.inode + 1}
        for fields in changed:
            file = type(hello.file)(**{**{f: getattr(hello.file, f) for f in hello.file.__struct_fields__}, **fields})
            producer.servers[0]._hello = Hello(hello.name, hello.layout, hello.num_blocks, file)
            assert consumer.load(producer.order()) == [list(range(7))]
        assert len(caplog.messages) == 3


def test_several_loads_at_once_and_after_a_pause(make: Make) -> None:
    producer, consumer = make(GQA, (2, 1), (1, 1), idle=0.2)
    for _ in range(2):
        orders = [producer.order(seed, count=1) for seed in range(6)]
        for number, order in enumerate(orders, start=1):
            order.block_ids[0] = number
        threads = [threading.Thread(target=consumer.load, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids, keys = [order.block_ids[0] for order in orders], [order.keys[0] for order in orders]
        consumer.check(Transfer(1, 0, True, ids, keys, [order.slots[0] for order in orders]))
        consumer.blocks[0].zero_()
        eventually(lambda: not consumer.stores[0]._links)  # nobody uses the connections any more
        eventually(lambda: not any(server._links for server in producer.servers))


# ---- what goes wrong


def test_the_wrong_secret_is_refused_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make(secret=b"x" * 32)
    for _ in range(3):
        assert consumer.load(producer.order()) == [list(range(7))]
    eventually(lambda: not producer.servers[0]._links)
    assert len(caplog.messages) == 2, caplog.messages
    assert any("does not have this cluster's secret" in message for message in caplog.messages)
    assert any("has another cluster_secret_file" in message for message in caplog.messages)


def test_another_engine_at_the_same_address_is_not_read(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make(producer={"name": "another"})
    assert consumer.load(producer.order()) == [list(range(7))]
    assert "the one that was asked has ended" in caplog.messages[-1]


def test_an_engine_that_was_restarted_is_connected_anew(make: Make) -> None:
    producer, consumer = make()
    assert consumer.load(producer.order()) == [[]]
    producer.close()
    assert consumer.load(producer.order()) == [list(range(7))]
    again, _ = make()
    order = again.order()
    assert consumer.load(order) == [[]]
    consumer.check(order)


def test_layouts_that_do_not_fit_are_refused(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, _ = make(WINDOWS)
    _, consumer = make(GQA)
    assert consumer.load(producer.order()) == [list(range(7))] == consumer.load(producer.order())[:1]
    assert len([message for message in caplog.messages if "different numbers of KV groups" in message]) == 1


@pytest.mark.parametrize("block_id", [0, 12, -1, 2**40])
@pytest.mark.parametrize("shared", [False, True])
def test_blocks_that_nobody_has_are_refused(make: Make, block_id: int, shared: bool) -> None:
    producer, consumer = make(producer={"shared": shared})
    order = producer.order()
    order.slots[3] = block_id
    assert consumer.load(order) == [list(range(7))]
    order = producer.order(1)
    assert consumer.load(order) == [[]]  # the next one may be right


@pytest.mark.parametrize("runs", [[(-1, 4)], [(0, 0)], [(0, 1 << 20)], [(0, -5)], [(1 << 40, 1)], [(0, 1)] * 40_000])
def test_bytes_outside_of_blocks_are_refused(
    make: Make, caplog: pytest.LogCaptureFixture, runs: list[tuple[int, int]]
) -> None:
    producer, _ = make()
    connection = wire.connect("127.0.0.1", producer.peer.ports[0], SECRET)
    connection.send(Read([1, 2], runs))
    assert isinstance(connection.receive(_answers), Problem)
    assert connection.receive(_answers) is None
    connection.close()
    eventually(lambda: any("has ended" in message for message in caplog.messages))


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: quire\r\n\r\n" * 9, b"", b"\0" * 64, b"\xff" * 100_000])
def test_garbage_disturbs_nobody(make: Make, garbage: bytes) -> None:
    producer, consumer = make(producer={"handshake": 0.5})
    port = producer.peer.ports[0]
    with socket.create_connection(("127.0.0.1", port)) as link:
        try:
            link.sendall(garbage)
            while link.recv(1 << 16):
                pass  # the server ends it, even if nothing is sent
        except ConnectionError:
            pass
    producer.servers[0]._handshake = LONGEST
    assert consumer.load(producer.order()) == [[]]


def test_frames_that_are_too_long_or_changed_end_the_connection(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, _ = make()
    for damage, message in (
        (lambda frame: b"\x7f" + frame[1:], "too long"),
        (lambda frame: frame[:-1] + b"x", "not authentic"),
        (lambda frame: frame[:4] + bytes(32) + frame[36:], "not authentic"),
        (lambda frame: frame + frame, "not authentic"),
    ):
        connection = wire.connect("127.0.0.1", producer.peer.ports[0], SECRET)
        real, sent = connection._link, bytearray()

        class Recorder:
            def sendmsg(self, views: list[memoryview], sent: bytearray = sent) -> int:
                sent += b"".join(views)
                return len(b"".join(views))

        connection._link = Recorder()  # type: ignore[assignment]
        connection.send(Describe())
        connection._link = real
        real.sendall(damage(bytes(sent)))
        with contextlib.suppress(ConnectionError):
            while connection.receive(_answers) is not None:
                pass
        connection.close()
        eventually(lambda message=message: any(message in text for text in caplog.messages))  # type: ignore[misc]
        caplog.clear()
    with pytest.raises(ValueError, match="too long"):
        connection.send(Problem("x" * 2_000_000))


def test_connections_are_bounded(make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.transfer.store._REST_SECONDS", LONGEST)
    producer, consumer = make(producer={"most_connections": 2}, streams=1)
    port = producer.peer.ports[0]
    held = [TcpSource("127.0.0.1", port, SECRET) for _ in range(2)]
    with pytest.raises(ConnectionError):
        ask("127.0.0.1", port, SECRET)
    eventually(lambda: any("there are 2 connections already" in text for text in caplog.messages))
    assert consumer.load(producer.order()) == [list(range(7))]
    for source in held:
        source.close()
    eventually(lambda: not producer.servers[0]._links)
    assert consumer.load(producer.order()) == [list(range(7))]  # without a new attempt
    for link in consumer.stores[0]._links.values():
        link.rest_until = 0.0
    assert consumer.load(producer.order()) == [[]]


class Stuck(CopiedRows):
    """Rows of an engine that stops while it sends, until it may go on."""

    begun, may_go_on = threading.Event(), threading.Event()

    def read(self, block_ids: Sequence[int], targets: Sequence[Tensor], span: slice = WHOLE) -> None:
        self.begun.set()
        self.may_go_on.wait(LONGEST)


@pytest.fixture
def stuck(make: Make) -> Iterator[type[Stuck]]:
    """make: is closed afterwards, when the threads that are stuck go on."""
    Stuck.begun.clear()
    Stuck.may_go_on.clear()
    yield Stuck
    Stuck.may_go_on.set()


def test_a_peer_that_stops_answering_is_given_up(
    make: Make, stuck: type[Stuck], caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make(producer={"rows": stuck}, timeout=0.3)
    assert consumer.load(producer.order()) == [list(range(7))]
    assert "timed out" in caplog.messages[-1]


def test_a_client_that_stops_reading_is_given_up(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = ModelModel(head_dim=512, block_size=64)  # 4 MB a block
    producer, _ = make(model, producer={"timeout": 0.3})
    connection = wire.connect("127.0.0.1", producer.peer.ports[0], SECRET)
    size = producer.layouts[0].block_bytes
    connection.send(Read(list(range(1, 12)), [(0, size)]))
    eventually(lambda: not producer.servers[0]._links)
    assert "timed out" in caplog.messages[-1]
    connection.close()


def test_nobody_listens(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        order = producer.order()
        order.peer = Peer(NAME, "127.0.0.1", (free.getsockname()[1],))
        assert consumer.load(order) == [list(range(7))]
    assert "refused" in caplog.messages[-1]


_OTHER_PROCESS = """
import sys
sys.path[:0] = {path}
from support.kv_peers import ModelModel, Producer
producer = Producer(ModelModel(head_dim=512, block_size=64).layouts(2, 1), shared={shared})
print(*producer.peer.ports, flush=True)
sys.stdin.read()
"""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_that_is_killed(make: Make, shared: bool) -> None:
    """Blocks come from another process. When it is killed in the middle, they are reported as failed, or were read."""
    model = ModelModel(head_dim=512, block_size=64)
    path = [str(Path(__file__).parents[1]), *sys.path]
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS.format(path=path, shared=shared)], stdin=-1, stdout=-1, text=True
    )
    consumer = Consumer(model.layouts(1, 1))
    try:
        assert other.stdout is not None
        ports = tuple(map(int, other.stdout.readline().split()))
        slots = list(range(1, 12))
        order = Transfer(1, 0, True, slots, [(0, b"")] * 11, slots, Peer(NAME, "127.0.0.1", ports))
        assert consumer.load(order) == [[]]
        consumer.check(order)
        killing = threading.Timer(0.02, lambda: (other.send_signal(signal.SIGKILL), other.wait()))
        killing.start()
        results = []
        while killing.is_alive():
            results.append(consumer.load(order))
        results.append(consumer.load(order))
        assert all(failed in ([[]], [slots and list(range(11))]) for failed in results)
        assert shared or results[-1] == [list(range(11))]
    finally:
        other.kill()
        other.communicate()
        consumer.close()


def test_closing_ends_what_is_under_way(make: Make, stuck: type[Stuck]) -> None:
    producer, consumer = make(producer={"rows": stuck}, timeout=LONGEST)
    results: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: results.append(consumer.load(producer.order())))
    thread.start()
    assert stuck.begun.wait(LONGEST)
    consumer.close()
    thread.join()
    assert results == [[list(range(7))]]


def test_shared_memory_is_given_back(make: Make) -> None:
    producer, _ = make(producer={"shared": True})
    memory = producer.memories[0]
    assert memory.handle is not None
    assert os.fstat(memory.handle).st_blocks
    memory.give_back()
    assert not os.fstat(memory.handle).st_blocks
    assert not memory.blocks.any()
