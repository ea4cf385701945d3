"""One engine on two machines: what it says, and what faults of the machines and the link between them do to streams."""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from support.checkpoints import Checkpoints
from support.nodes import ADDRESSES, Headless, Machines, OnMachine, two_machines
from support.server import eventually
from support.streams import MODEL, STREAMS, all_streams, expected_streams

pytestmark = pytest.mark.slow

OPTIONS = ["--dtype", "float32", "--max-model-len", "192", "--kv-cache-memory-bytes", "64M"]
# The options of both machines, with those of machine 0, and those of machine 1.
LAYOUTS = {
    "tp": (["-tp", "2", "--nnodes", "2", "--master-addr", ADDRESSES[0]], [], ["--node-rank", "1"]),
    "pp": (["-pp", "2", "--nnodes", "2", "--master-addr", ADDRESSES[0]], [], ["--node-rank", "1"]),
    "dp": (["-dp", "2", "-dpl", "1", "--data-parallel-address", ADDRESSES[0]], [], ["--data-parallel-start-rank", "1"]),
}
LAYOUTS["experts"] = ([*LAYOUTS["dp"][0], "--enable-expert-parallel"], [], LAYOUTS["dp"][2])
MODELS = {"experts": "mixture"}  # others have the bundled model
CUT_SECONDS = 10.0


@pytest.fixture(scope="module")
def said(checkpoints: Checkpoints) -> Callable[[str], list[tuple[str, str]]]:
    """What one process says to the streams of a layout."""

    @functools.cache
    def by_model(path: str | None) -> list[tuple[str, str]]:
        return expected_streams(max_model_len=192, model=path)

    return lambda layout: by_model(str(checkpoints.path("qwen3_moe")) if layout in MODELS else None)


@pytest.fixture
def expected(request: pytest.FixtureRequest, said: Callable[[str], list[tuple[str, str]]]) -> list[tuple[str, str]]:
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    return said(parameters.get("layout", "dp"))


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as machines:
        for machine in machines.both:
            machine.add_model("mixture", checkpoints.path("qwen3_moe"))
        yield machines


def headless(machines: Machines, layout: str) -> Headless:
    both, _, second = LAYOUTS[layout]
    return Headless(machines[1], *OPTIONS, *both, *second, model=MODELS.get(layout, "demo"))


@contextmanager
def engine(machines: Machines, layout: str, *options: str) -> Iterator[tuple[OnMachine, Headless]]:
    """The server on machine 0, and the headless part on machine 1. Afterwards no process is left on either."""
    both, first, _ = LAYOUTS[layout]
    names = ["--host", machines.host, "--served-model-name", MODEL]
    with (
        headless(machines, layout) as other,
        OnMachine(machines[0], *OPTIONS, *names, *both, *first, *options, model=MODELS.get(layout, "demo")) as server,
    ):
        yield server, other
        machines.mend()
    for machine in machines.both:
        machine.wait_until_empty()


def check(server: OnMachine, expected: list[tuple[str, str]], fault: Callable[[], object] | None = None) -> None:
    assert asyncio.run(all_streams(server.url, fault)) == expected


def cut(machines: Machines, server: OnMachine) -> None:
    """For ten seconds, or longer if the loss is noticed later, no packet arrives."""
    machines.lose_packets(100)
    time.sleep(CUT_SECONDS)
    eventually(lambda: "lost" in server.log)
    machines.lose_packets(0)


def delay(machines: Machines) -> None:
    """For some seconds, each packet is under way for 200 ms."""
    machines.delay_packets(0.2)
    time.sleep(4)
    machines.delay_packets(0)


def worker(machines: Machines, other: Headless, layout: str) -> psutil.Process:
    """The process on machine 1 that runs the model."""
    if layout not in ("dp", "experts"):
        return machines[1].rank(1)
    (core,) = (p for p in other.main.children() if "resource_tracker" not in " ".join(p.cmdline()))
    return core


def runs_again(server: OnMachine, layout: str) -> None:
    core = int(layout in ("dp", "experts"))
    eventually(lambda: f"Engine core {core} runs again" in server.log)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", ["experts", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp", "pp", "dp"))]
)
def test_two_machines_say_what_one_process_says_and_go_on_after_the_link_was_cut(machines, expected, layout):
    with engine(machines, layout) as (server, _):
        check(server, expected)
        server.wait_until_idle()
        check(server, expected, lambda: cut(machines, server))
        runs_again(server, layout)
        check(server, expected)
        server.wait_until_idle()


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_link_makes_streams_slow_and_nothing_else(machines, expected, layout):
    with engine(machines, layout) as (server, _):
        check(server, expected, lambda: delay(machines))
        assert "lost" not in server.log


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_go_on_when_the_process_with_the_model_is_lost_on_the_other_machine(machines, expected, layout, number):
    with engine(machines, layout) as (server, other):
        check(server, expected, lambda: worker(machines, other, layout).send_signal(number))
        runs_again(server, layout)
        check(server, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_go_on_when_the_headless_process_is_killed_and_started_again(machines, expected, layout):
    """Nothing that it had started is left."""
    with engine(machines, layout) as (server, other):

        def kill() -> None:
            other.main.kill()
            machines[1].wait_until_empty()

        def restart() -> None:
            kill()
            stack.enter_context(headless(machines, layout))

        with ExitStack() as stack:
            check(server, expected, restart)
            runs_again(server, layout)
            check(server, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_headless_process_that_was_stopped_joins_again(machines, expected, layout):
    def stop() -> None:
        other.main.suspend()
        eventually(lambda: "lost" in server.log)
        other.resume()

    with engine(machines, layout) as (server, other):
        check(server, expected, stop)
        runs_again(server, layout)
        check(server, expected)


@pytest.mark.nightly
def test_the_other_machine_takes_over_when_one_with_a_replica_is_lost_for_good(machines, expected):
    with engine(machines, "dp") as (server, other):

        def lose() -> None:
            machines.lose_packets(100)
            other.main.kill()

        check(server, expected, lose)
        assert server.get("/health")[0] == 200
        check(server, expected)
        assert "runs again" not in server.log


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp", pytest.param("tp", marks=pytest.mark.nightly)])
def test_when_the_parent_of_api_processes_is_killed_clients_see_an_error_and_no_process_is_left(
    machines, expected, layout
):
    """The headless machine waits for another server, and finds it."""
    both, first, _ = LAYOUTS[layout]
    names = ["--host", machines.host, "--served-model-name", MODEL, "--api-server-count", "2"]
    with headless(machines, layout) as other:
        with OnMachine(machines[0], *OPTIONS, *names, *both, *first) as server:
            made = asyncio.run(all_streams(server.url, lambda: server.main.kill()))
            assert len(made) == STREAMS
            errors = [answer for answer in made if answer not in expected]
            assert errors
            assert all(isinstance(error, Exception) for error in errors), errors  # of the API, or a closed connection
            machines[0].wait_until_empty()
            eventually(lambda: not machines[1].processes("quire.executor.rank"))
        with OnMachine(machines[0], *OPTIONS, *names, *both, *first) as server:
            check(server, expected)
        other.stop()
    for machine in machines.both:
        machine.wait_until_empty()
