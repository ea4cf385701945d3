"""What a core does with the orders of its clients, which may be on other machines and connect again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine import core_process
from quire.engine.core_process import _Clients
from quire.messages.engine import (
    AbortRequests,
    AddRequests,
    Connect,
    CoreStats,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    StepOutputs,
)


class FakeCore:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.stats = CoreStats()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests.append(request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.requests = [name for name in self.requests if name not in request_ids]


class FakeSocket:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, StepOutputs]] = []

    def send_multipart(self, frames: list[bytes]) -> None:
        self.sent.append((frames[0], msgspec.msgpack.decode(frames[1], type=StepOutputs)))


@pytest.fixture
def core() -> Any:
    return FakeCore()


@pytest.fixture
def socket() -> Any:
    return FakeSocket()


def requests(*names: str) -> AddRequests:
    return AddRequests([EngineCoreRequest(name, [1], None, 0, 1) for name in names])


def test_a_client_that_connects_again_begins_anew(core, socket):
    clients = _Clients(core, socket)
    clients.obey(b"1", Connect(client="first"))
    clients.obey(b"2", Connect(client="second"))
    clients.obey(b"1", requests("a", "b"))
    clients.obey(b"2", requests("c"))
    clients.obey(b"3", Connect(client="first"))
    assert core.requests == ["c"]
    clients.obey(b"3", requests("a"))
    assert core.requests == ["c", "a"]
    socket.sent.clear()
    clients.report([EngineCoreOutput("a", [7]), EngineCoreOutput("c", [8])])
    assert {client: [o.request_id for o in report.outputs] for client, report in socket.sent} == {
        b"2": ["c"],
        b"3": ["a"],
    }
    assert all(report.sent_at for _, report in socket.sent)


def test_clients_without_names_are_never_the_same(core, socket):
    clients = _Clients(core, socket)
    for client in (b"1", b"2"):
        clients.obey(client, Connect())
        clients.obey(client, requests(client.decode()))
    assert core.requests == ["1", "2"]


def test_orders_of_somebody_who_has_not_connected_are_dropped(core, socket, caplog):
    clients = _Clients(core, socket)
    for order in (requests("a"), AbortRequests(["b"])):
        clients.obey(b"1", order)
    assert core.requests == []
    assert caplog.text.count("has not said who it is") == 2


def test_outputs_that_are_too_long_to_be_sent_end_their_requests_with_an_error(core, socket, monkeypatch):
    monkeypatch.setattr(core_process, "MOST_MESSAGE_BYTES", 1000)
    clients = _Clients(core, socket)
    clients.obey(b"1", Connect())
    clients.obey(b"1", requests("a"))
    clients.report([EngineCoreOutput("a", [1 << 20] * 500)])
    output = socket.sent[-1][1].outputs[0]
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.ERROR, [])
    assert "ask for fewer logprobs" in str(output.stop_reason)
    assert core.requests == []
