"""Cores on other machines, as the server's machine sees them: how they join, answer, break off and come back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.checkpoints.hub import bundled_model
from quire.cluster.secret import Admission
from quire.config.engine import ConfigError, EngineConfig
from quire.engine import remote_cores
from quire.engine.core_client import CoreClient, CoreState
from quire.engine.remote_cores import RemoteCores
from quire.executor.agreement import facts
from quire.messages import engine as messages
from quire.messages.engine import (
    CoreDied,
    CoreEvent,
    CoreLost,
    CoreReady,
    CoreStats,
    CoreUp,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from support.cluster import SECRET, joining
from support.waiting import LONGEST, eventually_async

SIZE = CoreReady(10, 160, 160)


def request(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1, 2, 3], None, 0, 8)


class FakeCore:
    """Takes orders at an address of its own, and says what the test wants."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.Context()
        self._admission = Admission(self._context, SECRET)
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = SECRET.listen(self._socket, "127.0.0.1", port)
        self.client = b""

    async def next(self) -> Any:
        """The next order of its client."""
        await eventually_async(lambda: self._socket.poll(0), "an order")
        self.client, data = self._socket.recv_multipart()
        return msgspec.msgpack.decode(data, type=messages.CoreOrder)

    def say(self, *outputs: EngineCoreOutput, sent_at: float = 0.0, received: int = 0) -> None:
        report = messages.StepOutputs(list(outputs), CoreStats(), received, sent_at)
        self._socket.send_multipart([self.client, msgspec.msgpack.encode(report)])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._admission.close()
        self._context.term()


class FakeProcesses:
    """Tells the client what the test wants."""

    process_ids: list[int | None] = []  # noqa: RUF012
    tell: Callable[[CoreEvent], None]

    async def run(self, tell: Callable[[CoreEvent], None]) -> None:
        self.tell = tell
        await asyncio.Event().wait()

    def kill(self) -> None:
        """Nothing was started."""


def run(test: Callable[[CoreClient, FakeProcesses, list[Any]], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test with a client that has started or waits for its cores. It gets the list of the sink's outputs."""

    async def work() -> None:
        config = EngineConfig.create(cluster_secret_file="unused", **{"data_parallel_size": 2, **options})
        processes, outputs = FakeProcesses(), []
        client = CoreClient(config, Path(), processes)
        start = asyncio.create_task(client.start(lambda core, made, stats: outputs.extend((core, o) for o in made)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        try:
            await test(client, processes, outputs)
        finally:
            start.cancel()
            await client.shutdown()

    asyncio.run(asyncio.wait_for(work(), LONGEST))


@contextmanager
def fake_cores(count: int) -> Iterator[list[FakeCore]]:
    cores = [FakeCore() for _ in range(count)]
    try:
        yield cores
    finally:
        for core in cores:
            core.close()


async def up(processes: FakeProcesses, cores: list[FakeCore], first: int = 0) -> None:
    for rank, core in enumerate(cores, first):
        processes.tell(CoreUp(rank, core.address, SIZE, SECRET.secret))
        assert isinstance(await core.next(), messages.Connect)
        core.say()


def test_a_core_is_ready_when_it_has_answered():
    async def test(client: CoreClient, processes: FakeProcesses, outputs: list[Any]) -> None:
        processes.tell(CoreUp(0, core.address, SIZE, SECRET.secret))
        connect = await core.next()
        assert connect.client
        await up(processes, [other], first=1)
        await eventually_async(lambda: client.ready)
        assert client.ready == [1]
        core.say()
        await eventually_async(lambda: client.ready == [0, 1])

    with fake_cores(2) as (core, other):
        run(test)


def test_a_connection_that_breaks_is_made_again_and_its_requests_go_on_elsewhere():
    async def test(client: CoreClient, processes: FakeProcesses, outputs: list[Any]) -> None:
        await up(processes, [one, two])
        await eventually_async(lambda: client.ready == [0, 1])
        client.add([request("a")], core=1)
        assert [r.request_id for r in (await two.next()).requests] == ["a"]
        two.say(EngineCoreOutput("a", [7]), received=1)
        await eventually_async(lambda: outputs)
        two.close()
        again = await one.next()
        assert [(r.request_id, r.output_token_ids) for r in again.requests] == [("a", [7])]
        assert client.ready == [0]
        one.say(EngineCoreOutput("a", [8], FinishReason.STOP), received=1)
        await eventually_async(lambda: len(outputs) == 2)
        name = client._name
        back = FakeCore(int(two.address.rsplit(":", 1)[1]))
        assert (await back.next()).client == name
        back.say()
        await eventually_async(lambda: client.ready == [0, 1])
        assert client.restarts == 1
        back.close()

    one, two = FakeCore(), FakeCore()
    run(test)
    one.close()


def test_a_request_waits_for_a_lost_core_that_comes_back_at_once():
    """Its last outputs count, though the next connection is made before they are read."""

    async def test(client: CoreClient, processes: FakeProcesses, outputs: list[Any]) -> None:
        await up(processes, [old], first=0)
        await eventually_async(lambda: client.ready == [0])
        client.add([request("a")])
        await old.next()
        old.say(EngineCoreOutput("a", [7]), received=1)
        await eventually_async(lambda: outputs)
        processes.tell(CoreLost(0, CoreDied("its machine was lost"), given_up=False))
        processes.tell(CoreUp(0, new.address, SIZE, SECRET.secret))
        assert isinstance(await new.next(), messages.Connect)
        new.say()
        added = await new.next()
        assert [(r.request_id, r.output_token_ids) for r in added.requests] == [("a", [7])]

    with fake_cores(2) as (old, new):
        run(test, data_parallel_size=1)


def test_times_of_another_machine_are_those_of_this_ones_clock(monkeypatch):
    async def test(client: CoreClient, processes: FakeProcesses, outputs: list[Any]) -> None:
        await up(processes, [core])
        await eventually_async(lambda: client.ready == [0])
        client.add([request("a")])
        await core.next()
        began = asyncio.get_running_loop().time()
        core.say(EngineCoreOutput("a", [7], scheduled_at=1e9), sent_at=1e9 + 0.25, received=1)
        await eventually_async(lambda: outputs)
        now = asyncio.get_running_loop().time()
        assert began - 0.25 <= outputs[0][1].scheduled_at <= now - 0.25

    with fake_cores(1) as (core,):
        run(test, data_parallel_size=1)


def test_replicas_of_a_server_among_several_keep_their_numbers():
    async def test(client: CoreClient, processes: FakeProcesses, outputs: list[Any]) -> None:
        assert client.first == 2
        await up(processes, [one, two], first=2)
        await eventually_async(lambda: client.ready == [0, 1])
        processes.tell(CoreLost(3, CoreDied("gone"), given_up=True))
        await eventually_async(lambda: client.ready == [0])
        assert [core.state for core in client._cores] == [CoreState.READY, CoreState.DEAD]

    with fake_cores(2) as (one, two):
        run(test, data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[RemoteCores, dict[str, str]]]:
    """The cores of two replicas of four that are elsewhere, and the facts on which nodes must agree."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET.secret)
    path.chmod(0o600)
    config = EngineConfig.create(data_parallel_size=4, data_parallel_size_local=2, cluster_secret_file=str(path))
    object.__setattr__(config.cluster, "data_parallel_rpc_port", 0)  # any
    made = RemoteCores(config, bundled_model())
    yield made, facts(config, bundled_model())
    made.close()


def test_machines_report_their_cores_and_lose_them(remote):
    cores, agreed = remote
    events: list[CoreEvent] = []

    async def work() -> None:
        task = asyncio.create_task(cores.run(events.append))
        address = cores._head.address
        with joining(address, range(2, 4), facts=agreed) as node:
            await asyncio.to_thread(node.next)
            ups = [CoreUp(rank, f"tcp://10.0.0.7:{rank}", SIZE) for rank in (2, 3)]
            for event in (ups[0], ups[0], b"garbage", CoreUp(0, "another machine's", SIZE), ups[1]):
                node.node.send(event if isinstance(event, bytes) else msgspec.msgpack.encode(event))
            await eventually_async(lambda: len(events) == 2)
            assert events == [CoreUp(u.rank, u.address, SIZE, SECRET.secret) for u in ups]
            node.node.send(msgspec.msgpack.encode(CoreLost(3, CoreDied("it failed"), given_up=False)))
            await eventually_async(lambda: len(events) == 3)
        await eventually_async(lambda: len(events) == 5)
        lost = [event for event in events[3:] if isinstance(event, CoreLost)]
        assert [(event.rank, event.given_up, event.died.silent) for event in lost] == [
            (2, False, True),
            (3, False, True),
        ]
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), LONGEST))


def test_a_core_whose_machine_does_not_come_is_given_up_until_it_comes(remote, monkeypatch):
    monkeypatch.setattr(remote_cores, "JOIN_SECONDS", 0.0)
    cores, agreed = remote
    events: list[CoreEvent] = []

    async def work() -> None:
        task = asyncio.create_task(cores.run(events.append))
        await eventually_async(lambda: len(events) == 2)
        assert all(isinstance(event, CoreLost) and event.given_up for event in events)
        with joining(cores._head.address, range(2, 4), facts=agreed) as node:
            await asyncio.to_thread(node.next)
            node.node.send(msgspec.msgpack.encode(CoreUp(2, "tcp://10.0.0.7:2", SIZE)))
            await eventually_async(lambda: len(events) == 3)
            assert isinstance(events[2], CoreUp)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), LONGEST))


def test_a_backend_without_its_package_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    from quire.executor.ray_cluster import RayCluster

    with pytest.raises(ConfigError, match=r"pip install .*\[ray\]"):
        RayCluster()
