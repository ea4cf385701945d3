"""Many more requests at once than a server runs: each is answered or refused, and everything is returned afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
import pytest

from support.fault_requests import SMALL
from support.server_process import Server
from support.waiting import LONGEST, eventually

FEW = ("--max-num-seqs", "4")
PATIENT = ("--header-timeout", "600", "--timeout-keep-alive", "600")  # the clients of a busy machine are slow
MOST_GROWTH = 100e6  # bytes of memory
MANY = 2000


@pytest.fixture(scope="module", autouse=True)
def _descriptors():
    """This process has a connection for each request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MANY:
        pytest.skip("the limit of open files is too small for the clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass
class Counts:
    """Of all processes of a server."""

    processes: int
    threads: int
    descriptors: int
    memory: int  # bytes (PSS)

    @classmethod
    def of(cls, server: Server) -> Counts:
        own = psutil.Process(server.process.pid)
        counts = cls(0, 0, 0, 0)
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                counts.processes += 1
                counts.threads += process.num_threads()
                counts.descriptors += process.num_fds()
                counts.memory += process.memory_full_info().pss
        return counts

    def has_returned(self, before: Counts) -> bool:
        names = ("processes", "threads", "descriptors")
        fits = all(getattr(self, name) <= getattr(before, name) for name in names)
        return fits and self.memory < before.memory + MOST_GROWTH


async def ask(session: aiohttp.ClientSession, server: Server, number: int, statuses: Counter[Any]) -> None:
    body = {"prompt": f"Story {number}", "max_tokens": 8, "ignore_eos": True, "stream": bool(number % 2)}
    try:
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        statuses[repr(error)] += 1
        return
    is_whole = response.status != 200 or not number % 2 or text.endswith("data: [DONE]\n\n")
    statuses[response.status if is_whole else "broken"] += 1


async def watch(server: Server, waits: list[float], end: asyncio.Event) -> None:
    """Check the health on a connection that stays open."""
    async with aiohttp.ClientSession() as session:
        while not end.is_set():
            began = time.monotonic()
            async with session.get(f"{server.url}/health") as response:
                assert response.status == 200
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.1)


async def ask_all(server: Server, count: int) -> Counter[Any]:
    statuses: Counter[Any] = Counter()
    waits: list[float] = []
    end = asyncio.Event()
    watching = asyncio.create_task(watch(server, waits, end))
    while not waits:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        asked = [ask(session, server, number, statuses) for number in range(count)]
        await asyncio.wait_for(asyncio.gather(*asked), LONGEST)
    seconds = time.monotonic() - began
    end.set()
    await watching
    print(f"{count} requests in {seconds:.1f} s: {dict(statuses)}; {len(waits)} checks, longest {max(waits):.2f} s")
    return statuses


def check(count: int, *arguments: str, files: tuple[int, int] | None = None) -> Counter[Any]:
    with Server(*SMALL, *FEW, *PATIENT, *arguments, files=files) as server:
        asyncio.run(ask_all(server, 50))
        server.wait_until_idle()
        before = Counts.of(server)
        statuses = asyncio.run(ask_all(server, count))
        server.wait_until_idle()
        eventually(lambda: Counts.of(server).has_returned(before), lambda: (before, Counts.of(server)))
        print(f"before: {before}, after: {Counts.of(server)}")
        assert "Traceback" not in server.log
        assert statuses.total() == count
    return statuses


@pytest.mark.slow
def test_requests_beyond_the_queue_are_refused_and_the_others_are_answered():
    statuses = check(200, "--max-waiting-requests", "16")
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 16


@pytest.mark.nightly
@pytest.mark.parametrize("files", [None, (1024, 1024), (256, 256)], ids=["", "ulimit 1024", "ulimit 256"])
def test_two_thousand_requests_at_once_are_all_answered(files: tuple[int, int] | None):
    assert check(MANY, files=files) == {200: MANY}


@pytest.mark.nightly
def test_of_two_thousand_requests_those_beyond_the_queue_are_refused():
    statuses = check(MANY, "--max-waiting-requests", "64")
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 64


@pytest.mark.nightly
def test_of_two_thousand_requests_those_that_take_too_long_end_with_504():
    statuses = check(MANY, "--request-timeout", "3")
    assert set(statuses) <= {200, 504, "broken"}  # a stream that has begun ends with an error event


@pytest.mark.nightly
def test_a_server_without_free_descriptors_waits_without_using_a_processor():
    with Server(*SMALL, *FEW, "--header-timeout", "600", files=(64, 64)) as server:

        async def hold() -> None:
            held = await asyncio.gather(*(asyncio.open_connection(*server.host_and_port) for _ in range(200)))
            while "New connections wait" not in server.log:
                await asyncio.sleep(0.01)
            process = psutil.Process(server.process.pid)
            used, began = sum(process.cpu_times()[:2]), time.monotonic()
            await asyncio.sleep(3)
            share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
            print(f"while connections wait, the server uses {100 * share:.0f} % of a processor")
            assert share < 0.5
            for _, writer in held:
                writer.close()

        asyncio.run(hold())
        assert server.get("/health")[0] == 200
        assert server.log.count("New connections wait") == 1
