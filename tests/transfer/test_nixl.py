"""Reads by NIXL: with the library where it is installed, and everywhere with a stand-in for its module."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.transfer.layout import RankLayout
from quire.transfer.nixl_reads import NixlMemory
from quire.transfer.store import PeerStore
from quire.worker.kv_transfer import Rows
from support.kv_peers import SECRET, ModelModel, Producer, check
from support.waiting import LONGEST

NUM_BLOCKS = 16


class SimulatedGpu:
    """An agent with the methods of nixl_agent that are used. It copies when its state is asked for the second time."""

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.others, self.registered = name, set[str](), list[Any]()
        self.slow, self.fails, self.released = False, False, 0

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> Any:
        assert kind == "DRAM"
        self.registered += regions
        return regions

    def deregister_memory(self, regions: Any) -> None:
        for region in regions:
            self.registered.remove(region)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.others.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.others.remove(name)

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> Any:
        return regions

    def initialize_xfer(self, operation: str, own: Any, others: Any, name: str) -> Any:
        assert operation == "READ"
        assert name in self.others
        start, size, _, _ = self.registered[0]
        assert all(start <= address and address + length <= start + size for address, length, _ in own)
        return SimpleNamespace(pairs=list(zip(own, others, strict=True)), asked=0)

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        handle.asked += 1
        if self.fails:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if self.slow or handle.asked < 2:
            return "PROC"
        for (target, size, _), (source, length, _) in handle.pairs:
            assert size == length
            ctypes.memmove(target, source, size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        self.released += 1


STAND_IN = SimpleNamespace(nixl_agent=SimulatedGpu, nixl_agent_config=lambda **_: None)


@pytest.fixture(params=["stand-in", pytest.param("nixl", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest) -> Any:
    if request.param == "stand-in":
        return STAND_IN
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed")
    from nixl import _api

    return _api


class Pair:
    """Ranks that have NIXL, and one that reads from them."""

    def __init__(self, model: ModelModel, theirs: tuple[int, int], library: Any, timeout: float = LONGEST) -> None:
        self.layout: RankLayout = model.layout(0, 1, 0, 1)
        self.producer = Producer(model.layouts(*theirs))
        self.others = [NixlMemory(memory.blocks, library) for memory in self.producer.memories]
        for server, nixl in zip(self.producer.servers, self.others, strict=True):
            server._hello = type(server._hello)(
                server._hello.name, server._hello.layout, server._hello.num_blocks, None, nixl.describe()
            )
        self.blocks = torch.zeros(NUM_BLOCKS, self.layout.block_bytes, dtype=torch.uint8)
        self.own = NixlMemory(self.blocks, library)
        self.store = PeerStore(self.layout, 0, SECRET, transports=["nixl"], nixl=self.own, timeout=timeout)

    def load(self, seed: int = 0) -> list[int]:
        order = self.producer.order(seed)
        self.blocks.zero_()
        failed = self.store.load(Rows.of(self.blocks), order)
        if not failed:
            check(self.blocks.numpy(), self.layout, order)
        return failed

    def close(self) -> None:
        self.store.close()
        self.producer.close()
        for nixl in self.others:
            nixl.close()


@pytest.fixture
def pair(library: Any, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(*getattr(request, "param", (ModelModel(), (2, 2))), library)
    yield made
    made.close()


@pytest.mark.parametrize(
    "pair", [(ModelModel(), (1, 1)), (ModelModel(), (2, 2)), (ModelModel(kv_heads=0), (4, 1))], indirect=True
)
def test_blocks_arrive_whole(pair: Pair) -> None:
    for seed in range(3):
        assert pair.load(seed) == []


def test_memory_that_has_moved_is_not_written(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.own.address -= 64
    assert pair.load() == list(range(7))
    assert "has moved" in caplog.messages[-1]


def test_blocks_that_nobody_has_are_refused(pair: Pair) -> None:
    order = pair.producer.order()
    order.slots[2] = 12
    assert pair.store.load(Rows.of(pair.blocks), order) == list(range(7))
    assert not pair.blocks.any()


@pytest.mark.parametrize("library", ["stand-in"], indirect=True)
def test_a_transfer_that_fails_or_stops(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(ModelModel(), (1, 1), library)
    agent = pair.own.agent
    agent.fails = True
    assert pair.load() == list(range(7))
    assert "NIXL: NIXL_ERR_REMOTE_DISCONNECT" in caplog.messages[-1]
    agent.fails, agent.slow, pair.store._timeout = False, True, 0.2
    assert pair.load() == list(range(7))
    assert "has not read its blocks" in caplog.messages[-1]
    agent.slow, pair.store._timeout = False, LONGEST
    assert pair.load() == []
    assert agent.released == 3
    pair.close()
    assert not agent.others
    assert not agent.registered


def test_a_rank_without_nixl_is_read_otherwise(
    library: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.transfer.store._REST_SECONDS", 0.0)
    pair = Pair(ModelModel(), (1, 1), library)
    for server in pair.producer.servers:
        server._hello = type(server._hello)(server._hello.name, server._hello.layout, server._hello.num_blocks)
    assert pair.load() == list(range(7))
    assert "nixl: it has no NIXL" in caplog.messages[-1]
    pair.store._transports = ("shared_memory", "nixl", "tcp")
    assert pair.load() == []
    pair.close()


def test_a_library_that_cannot_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("No plugins available for NIXL, cannot start transfers!")

    module = SimpleNamespace(_api=SimpleNamespace(nixl_agent=broken, nixl_agent_config=lambda **_: None))
    monkeypatch.setitem(sys.modules, "nixl", module)
    assert NixlMemory.make(torch.zeros(2, 64, dtype=torch.uint8)) is None
    assert "NIXL cannot be used: No plugins" in caplog.messages[-1]
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert NixlMemory.make(torch.zeros(2, 64, dtype=torch.uint8)) is None
