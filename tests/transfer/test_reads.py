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

import numpy as np
import pytest
import zmq
from torch import Tensor

from quire.cluster import secret
from quire.cluster.secret import ClusterSecret
from quire.messages.transfers import Peer, Transfer
from quire.transfer import server as server_module
from quire.transfer import wire
from quire.transfer.messages import Data, Hello, Problem, Read
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
    monkeypatch.setattr("quire.transfer.wire._FRAME_BYTES", 100)
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


# ---- what goes wrong


def test_the_wrong_secret_is_refused_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make(secret=ClusterSecret(b"x" * 32))
    for _ in range(3):
        assert consumer.load(producer.order()) == [list(range(7))]
    eventually(lambda: len(caplog.messages) == 2)
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
    connection = wire.Connection("127.0.0.1", producer.peer.ports[0], SECRET)
    connection.send(Read(7, [1, 2], runs))
    assert isinstance(connection.receive(_answers), Problem)
    connection.send(Read(8, [1, 2], [(0, 4)]))
    assert connection.receive(_answers) == Data(8), "the connection can still be used"
    connection.close()
    assert any("was refused" in message for message in caplog.messages)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: quire\r\n\r\n" * 9, b"", b"\0" * 64, b"\xff" * 100_000])
def test_garbage_disturbs_nobody(make: Make, garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(secret._MILLISECONDS, zmq.HANDSHAKE_IVL, 500)
    producer, consumer = make()
    port = producer.peer.ports[0]
    with socket.create_connection(("127.0.0.1", port)) as link:
        try:
            link.sendall(garbage)
            while link.recv(1 << 16):
                pass  # the server ends it, even if nothing is sent
        except ConnectionError:
            pass
    monkeypatch.undo()
    assert consumer.load(producer.order()) == [[]]


def test_messages_that_are_too_long_or_have_no_meaning_disturb_nobody(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make()
    connection = wire.Connection("127.0.0.1", producer.peer.ports[0], SECRET)
    with pytest.raises(ValueError, match="too long"):
        connection.send(Problem("x" * 2_000_000))
    connection._socket.send(b"\xc1")
    assert isinstance(connection.receive(_answers), Problem)
    connection._socket.send(b"x" * 2_000_000)
    with pytest.raises(ConnectionError, match="has closed the connection"):
        connection.receive(_answers)
    connection.close()
    assert consumer.load(producer.order()) == [[]]


def test_what_travels_cannot_be_read_or_changed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Through a machine between both engines, which copies what it sees, and then changes a byte."""
    producer, _ = make()
    with Eavesdropper(producer.peer.ports[0]) as between:
        source = TcpSource("127.0.0.1", between.port, SECRET)
        source.hello()
        blocks = np.zeros((2, producer.layouts[0].block_bytes), np.uint8)
        source.read([(1, 1)], [(0, 0, blocks.shape[1])], blocks)
        content = producer.memories[0].blocks[1].numpy().tobytes()
        assert blocks[1].tobytes() == content
        assert content[:16] not in between.seen
        assert NAME.encode() not in between.seen
        between.changes = True
        with pytest.raises(ConnectionError):
            source.read([(1, 1)], [(0, 0, blocks.shape[1])], blocks)
        source.close()


class Eavesdropper:
    """Passes on a connection. seen: what the server has sent. changes: damage it from now on."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self.changes = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        threading.Thread(target=self._pass_on, args=(client, self._server, False), daemon=True).start()
        self._pass_on(self._server, client, True)

    def _pass_on(self, origin: socket.socket, target: socket.socket, from_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(origin.recv(1 << 16)):
                if from_server:
                    self.seen += data
                    if self.changes and len(data) > 100:  # no heartbeat
                        data[-20] ^= 1
                target.sendall(data)

    def __enter__(self) -> Eavesdropper:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._listener.close()


def test_connections_are_bounded(make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.transfer.store._REST_SECONDS", LONGEST)
    producer, consumer = make(producer={"most_connections": 2}, streams=1)
    port = producer.peer.ports[0]
    held = [TcpSource("127.0.0.1", port, SECRET) for _ in range(2)]
    with pytest.raises(ConnectionError, match="as many connections as it may have"):
        ask("127.0.0.1", port, SECRET)
    eventually(lambda: any("there are 2 connections already" in text for text in caplog.messages))
    assert consumer.load(producer.order()) == [list(range(7))]
    assert not any("does not have this cluster's secret" in text for text in caplog.messages)
    for source in held:
        source.hello()
        source.close()
    eventually(lambda: not producer.servers[0]._connections.count)
    assert consumer.load(producer.order()) == [list(range(7))]  # without a new attempt
    for link in consumer.stores[0]._links.values():
        link.rest_until = 0.0
    assert consumer.load(producer.order()) == [[]]


def test_connections_that_have_ended_are_not_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(secret._MILLISECONDS, zmq.HANDSHAKE_IVL, 500)
    producer, consumer = make(idle=0.2)
    connections = producer.servers[0]._connections
    strangers = [socket.create_connection(("127.0.0.1", producer.peer.ports[0])) for _ in range(9)]
    eventually(lambda: connections.count == 9)
    for stranger in strangers[:6]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
    for stranger in strangers[:3]:
        stranger.close()
    with pytest.raises(wire.WrongSecretError):
        ask("127.0.0.1", producer.peer.ports[0], ClusterSecret(b"x" * 32))
    monkeypatch.undo()
    assert consumer.load(producer.order()) == [[]]
    eventually(lambda: not connections.count)  # the others took too long, and the consumer has no more to read
    for stranger in strangers:
        stranger.close()


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


def test_a_client_that_stops_reading_disturbs_nobody(make: Make) -> None:
    model = ModelModel(head_dim=512, block_size=64)  # 4 MB a block
    producer, consumer = make(model)
    connection = wire.Connection("127.0.0.1", producer.peer.ports[0], SECRET)
    connection.send(Read(0, list(range(1, 12)), [(0, producer.layouts[0].block_bytes)]))
    assert consumer.load(producer.order()) == [[]]
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
