"""Sessions between the head of a cluster and its nodes: who may join, and how both notice that the other has gone."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import msgspec
import pytest
import zmq

from quire.cluster import head as heads
from quire.cluster import node as nodes
from quire.cluster.messages import Add, Answer, Beat, Delete, Get, Has, Leave, Payload, Put, ToNode
from quire.cluster.secret import ClusterSecret
from quire.config.engine import ConfigError
from support.cluster import FACTS, SECRET, joining, listening
from support.server import eventually
from support.waiting import LONGEST


def test_a_node_joins_and_both_ends_exchange_messages():
    with listening() as head, joining(head.head.address, range(2, 4)) as node:
        assert head.next() == ("joined", range(2, 4))
        assert node.next() == ("begin", b"welcome")
        assert head.head.missing() == [4, 5]
        node.node.send(b"hello")
        assert head.next() == ("received", range(2, 4), b"hello")
        assert node.next() == ("received", b"you said hello")


def test_a_node_that_is_told_to_end_says_so():
    with listening() as head, joining(head.head.address, range(2, 4)) as node:
        head.next()
        node.next()
        node.node.stop()
        assert head.next(3) == ("lost", range(2, 4), "the node at 10.0.0.7 was lost: it was told to end")
        assert node.next() == ("end",)
        assert node.ended() is None


def test_a_node_waits_for_its_head_and_joins_the_next_one():
    with listening() as head:
        address = head.head.address
    port = int(address.rsplit(":", 1)[1])
    with joining(address, range(2, 6)) as node:
        for _ in range(2):
            with listening(port) as head:
                assert head.next() == ("joined", range(2, 6))
                assert node.next() == ("begin", b"welcome")
            assert node.next() == ("end",)


@pytest.mark.parametrize(
    ("members", "facts", "problem"),
    [
        (
            range(2, 4),
            {**FACTS, "max_model_len": "4096"},
            "max_model_len differs: it is 512 at the head, and 4096 at the node",
        ),
        (range(2, 4), {**FACTS, "new_option": "1"}, "new_option differs: it is None at the head, and 1 at the node"),
        (range(2, 4), {"max_model_len": "512"}, "Quire's version differs: it is 1.0 at the head, and None at the node"),
        (range(5, 7), FACTS, "the head expects ranks 2 to 5 from other machines"),
        (range(2, 2), FACTS, "the head expects ranks 2 to 5 from other machines"),
    ],
)
def test_a_node_that_does_not_fit_is_an_error_at_both_ends(caplog, members, facts, problem):
    with listening() as head, joining(head.head.address, members, facts=facts) as node:
        error = node.ended()
        assert isinstance(error, ConfigError)
        assert "refuses the node at 10.0.0.7" in str(error)
        assert problem in str(error)
        refused = next(record for record in caplog.records if record.levelno == logging.ERROR)
        assert problem in refused.getMessage()
        assert "10.0.0.7" in refused.getMessage()
        assert head.events.empty()
        assert head.head.missing() == [2, 3, 4, 5]


def test_a_rank_that_is_claimed_twice_is_an_error_at_both_ends(caplog):
    with listening() as head, joining(head.head.address, range(2, 4)) as first:
        first.next()
        with joining(head.head.address, range(3, 5)) as second:
            assert "rank 3 has joined already, from 10.0.0.7" in str(second.ended())
        assert "rank 3 has joined already" in caplog.text
        first.node.send(b"I am still there")
        assert first.next() == ("received", b"you said I am still there")


def test_versions_that_differ_are_a_warning(caplog):
    with listening() as head, joining(head.head.address, range(2, 6), versions={"torch": "2.11"}) as node:
        assert node.next() == ("begin", b"welcome")
    assert "torch has version 2.13 at the head, and 2.11 at the node at 10.0.0.7" in caplog.text


def test_other_secrets_are_named_as_the_cause_at_both_ends(caplog):
    with listening() as head, joining(head.head.address, range(2, 6), secret=ClusterSecret(bytes(32))):
        eventually(lambda: caplog.text.count("same cluster_secret_file") >= 2)
        assert head.events.empty()


def test_garbage_of_a_peer_with_the_secret_is_logged_and_dropped(caplog):
    with listening() as head, joining(head.head.address, range(2, 6)) as node:
        node.next()
        context = zmq.Context()
        with context.socket(zmq.DEALER) as peer:
            SECRET.connect(peer, head.head.address)
            for garbage in (b"", os.urandom(100), msgspec.msgpack.encode(["Join", 1]), msgspec.msgpack.encode({})):
                peer.send(garbage)
            peer.send_multipart([msgspec.msgpack.encode(Payload(b"without a session")), b"and", b"more"])
            assert isinstance(msgspec.msgpack.decode(peer.recv(), type=ToNode), Leave)
        context.term()
        assert caplog.text.count("that has no meaning") == 4
        node.node.send(b"hello")
        assert node.next() == ("received", b"you said hello")


NODE = """
import sys
from support.cluster import Joining
node = Joining(sys.argv[1], range(2, 6))
print(*node.next(), flush=True)
while True:
    print(*node.next(3600), flush=True)
"""


def test_a_stopped_node_is_lost_and_joins_again_when_it_goes_on(monkeypatch):
    monkeypatch.setattr(heads, "SILENCE_SECONDS", LONGEST)
    with listening() as head:
        process = subprocess.Popen(
            [sys.executable, "-c", NODE, head.head.address],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begin b'welcome'\n"
        assert head.next() == ("joined", range(2, 6))
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(heads, "SILENCE_SECONDS", 2.0)
        kind, members, reason = head.next()
        assert (kind, members) == ("lost", range(2, 6))
        assert "silent for 2 s" in reason
        monkeypatch.setattr(heads, "SILENCE_SECONDS", LONGEST)
        process.send_signal(signal.SIGCONT)
        assert head.next() == ("joined", range(2, 6))
        assert process.stdout.readline() == "end\n"
        assert process.stdout.readline() == "begin b'welcome'\n"
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_node_that_is_started_again_takes_the_place_of_the_killed_one():
    with listening() as head:
        process = subprocess.Popen(
            [sys.executable, "-c", NODE, head.head.address],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begin b'welcome'\n"
        process.kill()
        process.wait()
        process.stdout.close()
        with joining(head.head.address, range(2, 6)) as node:
            assert node.next() == ("begin", b"welcome")
            assert [head.next()[0] for _ in range(3)] == ["joined", "lost", "joined"]


def test_a_node_whose_head_is_silent_ends_its_session(monkeypatch):
    monkeypatch.setattr(nodes, "SILENCE_SECONDS", 1.0)
    context = zmq.Context()
    with listening() as head, joining(head.head.address, range(2, 6)) as node:
        node.next()
        monkeypatch.setattr(head.head, "_tell", lambda identity, message: True)
        assert node.next() == ("end",)
    context.term()


def test_the_store_of_the_head_answers_when_a_key_is_there():
    context = zmq.Context()
    with listening() as head:
        asking, telling = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for peer in (asking, telling):
            SECRET.connect(peer, head.head.address)

        def answer(peer: zmq.Socket[bytes], request: msgspec.Struct | None = None) -> bytes:
            if request is not None:
                peer.send(msgspec.msgpack.encode(request))
            return msgspec.msgpack.decode(peer.recv(), type=Answer).value

        asking.send(msgspec.msgpack.encode(Get("key")))
        assert answer(asking, Add("later", 7)) == b"7"  # an answer to the first question would be the first
        assert answer(telling, Has(["key"])) == b""
        answer(telling, Put("key", b"value"))
        assert answer(asking) == b"value"
        assert answer(telling, Get("key")) == b"value"
        assert [answer(telling, Add("sum", n)) for n in (2, 3, -1)] == [b"2", b"5", b"4"]
        assert answer(telling, Has(["key", "sum"])) == b"1"
        assert answer(telling, Has(["key", "no"])) == b""
        assert [answer(telling, Delete("key")) for _ in range(2)] == [b"1", b""]
        telling.send(msgspec.msgpack.encode(Beat()))  # without a session
        assert isinstance(msgspec.msgpack.decode(telling.recv(), type=ToNode), Leave)
    context.destroy(linger=0)


def test_an_address_of_another_machine_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:0.*it must be an address of this machine"):
        heads.Head(SECRET, "192.0.2.1", 0, range(1), "rank", {}, {})
