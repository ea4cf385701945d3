"""A rank as a program: how it starts, and that it ends when its executor does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from quire.config.engine import EngineConfig
from quire.executor.link import Link
from quire.executor.messages import Broken, Hello, Ready, Reply, Result, Sample, Start, Submit, encode
from quire.observability.logging import LogOptions
from quire.parallel.mesh import open_meeting
from quire.parallel.sizes import MeshSizes
from support.engines import GREEDY, MAX_MODEL_LEN, core_request, make_llm
from support.waiting import LONGEST, eventually

KEY = bytes(range(32))


@contextmanager
def rank_program(key: bytes = KEY) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """The process of rank 0, and the socket to which it connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "quire.executor.rank", "127.0.0.1", str(listener.getsockname()[1]), "0"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(key.hex().encode() + b"\n\n")
        try:
            yield process, listener
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def greeted(listener: socket.socket) -> Link:
    link = Link(listener.accept()[0], KEY, b"executor")
    assert msgspec.msgpack.decode(link.receive(), type=Reply) == Hello(0)
    link.expect_within(LONGEST)
    return link


def start(path: Path, sizes: MeshSizes = MeshSizes(), port: int = 1) -> bytes:  # noqa: B008
    config = EngineConfig.create(model=str(path), dtype="float32", max_num_seqs=4, num_gpu_blocks_override=40)
    return encode(
        Start(
            config,
            str(path),
            MAX_MODEL_LEN,
            sizes,
            f"127.0.0.1:{port}",
            1,
            LogOptions("ERROR"),
            (0, sizes.world),
            [0, 0],
        )
    )


def next_of(link: Link, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """The next reply that is no heartbeat."""
    while not isinstance(reply := msgspec.msgpack.decode(link.receive(), type=Reply), kind):
        assert not isinstance(reply, Broken)
    return reply


def test_a_rank_takes_orders_ahead_of_its_results_and_ends_with_its_executor(checkpoints):
    """The key is not in the lists of processes. Ctrl-C, which a terminal sends to all processes, leaves the rank be."""
    path = checkpoints.path("llama")
    llm = make_llm(path, max_num_seqs=4, num_gpu_blocks_override=40)
    llm.core.add_request(core_request(llm, "0", [5, 6, 7], GREEDY))
    step = llm.core.scheduler.schedule()
    llm.core.executor.submit(step)
    expected = llm.core.executor.sample(step.step_id).result()
    with rank_program() as (process, listener):
        link = greeted(listener)
        shown = psutil.Process(process.pid)
        assert KEY.hex() not in " ".join([*shown.cmdline(), *shown.environ().values()])
        process.send_signal(signal.SIGINT)
        link.send(start(path))
        for order in (Submit(step), Sample(step.step_id)):
            link.send(encode(order))
        ready = next_of(link, Ready)
        assert isinstance(ready, Ready)
        assert ready.kv_cache == llm.core.executor.kv_cache
        assert next_of(link, Result) == Result(expected)
        link.close()
        assert process.wait(LONGEST) == 0


@pytest.mark.slow
def test_a_rank_that_waits_for_others_ends_when_its_executor_does(checkpoints):
    """It listens to nobody meanwhile, and notices when it sends a heartbeat."""
    meeting = open_meeting("127.0.0.1")
    with rank_program() as (process, listener):
        link = greeted(listener)
        link.send(start(checkpoints.path("llama"), MeshSizes(tp=2), meeting.port))
        eventually(meeting.num_keys)  # until it has come to the meeting, to which rank 1 never comes
        link.close()
        assert process.wait(LONGEST) == 1


@pytest.mark.slow
def test_a_rank_that_hears_nothing_ends(checkpoints):
    with rank_program() as (process, listener):
        link = greeted(listener)
        link.send(start(checkpoints.path("llama")))
        next_of(link, Ready)
        assert process.wait(LONGEST) == 0


def test_a_rank_that_does_not_know_the_key_ends_and_is_told_nothing():
    with rank_program(bytes(32)) as (process, listener):
        with pytest.raises(ConnectionError, match="does not know the key"):
            Link(listener.accept()[0], KEY, b"executor")
        assert process.wait(LONGEST) == 1


def test_a_rank_that_finds_no_executor_ends():
    with rank_program() as (process, listener):
        listener.close()
        assert process.wait(LONGEST) == 1
