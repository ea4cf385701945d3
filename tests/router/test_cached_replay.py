"""What the proxy knows from streams of KV events, of which it misses the beginning, the middle or all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.config.kv_events import KVEventOptions, of_rank
from quire.engine.kv_events import KVEventPublisher
from quire.messages.kv_events import END_OF_REPLAY, AllBlocksCleared, BlockStored, KVEventBatch
from quire.router import prefix_index as cached
from quire.router.call import Call
from quire.router.prefix_index import CachedPrefixes, listen
from support.waiting import LONGEST, eventually_async

SIZE = 4


def publisher(folder: Path, rank: int = 0, **fields: Any) -> KVEventPublisher:
    addresses = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    made = KVEventPublisher(KVEventOptions(True, **addresses, **fields), rank)
    made.send([AllBlocksCleared()])
    return made


def publish(to: KVEventPublisher, *blocks: int) -> None:
    """Each block follows the one with the number below it, except for each tenth. Each has a batch of its own."""
    for number in blocks:
        parent = number - 1 if number % 10 else None
        to.send([BlockStored([number], parent, [number] * SIZE, SIZE, None, "GPU", None)])


class Lossy:
    """The public socket of a publisher, which loses as many of the next messages as `losing` says."""

    def __init__(self, socket: Any) -> None:
        self._socket, self.losing = socket, 0

    def send_multipart(self, frames: list[bytes]) -> None:
        if self.losing:
            self.losing -= 1
        else:
            self._socket.send_multipart(frames)


def known(prefixes: CachedPrefixes, first: int = 0) -> int:
    """How many blocks from this one on the servers have."""
    call = Call("POST", "/v1/completions", [], b"{}", "a")
    call.tokens = [token for number in range(first, first + 10) for token in [number] * SIZE]
    return len(prefixes.pieces(call))


async def until(condition: Callable[[], bool], source: KVEventPublisher | None = None) -> None:
    """source: sends empty batches meanwhile, since what it sends before it knows of a subscription is lost."""
    await eventually_async(lambda: condition() or (source is not None and source.send([])))


@asynccontextmanager
async def following(folder: Path, replay: bool = True, ranks: int = 1, events: str = "") -> AsyncIterator[Any]:
    prefixes = CachedPrefixes([0] * ranks)
    tasks = [
        asyncio.create_task(
            listen(
                prefixes,
                rank,
                events or of_rank(f"ipc://{folder}/events", rank),
                of_rank(f"ipc://{folder}/replay", rank) if replay else None,
            )
        )
        for rank in range(ranks)
    ]
    try:
        yield prefixes
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def hear(prefixes: CachedPrefixes, source: KVEventPublisher, stream: int = 0) -> None:
    """Until the subscription is there, and the stream has told all."""
    await until(lambda: prefixes.next(stream) == source._next, source)


def test_what_was_published_before_is_known_and_the_loop_goes_on_in_between(tmp_path):
    source = publisher(tmp_path)
    publish(source, *range(8), *[100] * 500)

    async def check() -> None:
        async with following(tmp_path) as prefixes:
            apply, applied, at_once = prefixes.apply, 0, 0

            def count(stream: int, batch: KVEventBatch) -> None:
                nonlocal applied
                applied += 1
                apply(stream, batch)

            prefixes.apply = count
            while prefixes.next(0) < source._next:
                before = applied
                await asyncio.sleep(0)
                at_once = max(at_once, applied - before)
            assert applied == source._next
            assert at_once <= 2
            assert known(prefixes) == 8
            publish(source, 8, 9)
            await hear(prefixes, source)
            assert known(prefixes) == 10

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    source.close()


@pytest.mark.parametrize(
    ("replay", "buffer_steps", "expected"), [(True, 1000, 9), (True, 4, 9), (True, 3, 0), (False, 1000, 0)]
)
def test_lost_messages_are_asked_for_and_what_cannot_be_had_is_forgotten(tmp_path, replay, buffer_steps, expected):
    source = publisher(tmp_path, buffer_steps=buffer_steps)
    source._public = Lossy(source._public)

    async def check() -> None:
        async with following(tmp_path, replay) as prefixes:
            await hear(prefixes, source)
            publish(source, *range(6))
            await until(lambda: known(prefixes) == 6)
            source._public.losing = 3
            publish(source, 6, 7, 8, 20)
            await until(lambda: known(prefixes, 20) == 1)
            assert known(prefixes) == expected
            publish(source, 21)
            await until(lambda: known(prefixes, 20) == 2)

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    source.close()


def test_a_buffer_that_begins_too_late_says_what_it_can(tmp_path):
    source = publisher(tmp_path, buffer_steps=5)
    publish(source, *range(8), 20, 21, 22)

    async def check() -> None:
        await until(lambda: [int.from_bytes(number) for number, _ in source._buffer] == [7, 8, 9, 10, 11])
        async with following(tmp_path) as prefixes:
            await until(lambda: known(prefixes, 20) == 3)
            assert known(prefixes) == 0

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    source.close()


@pytest.mark.parametrize("count", [0, 4, 5, 9])
def test_a_server_that_has_restarted_has_only_what_it_says_since(tmp_path, count):
    """It may have sent fewer or more batches than its predecessor, or as many."""
    source = publisher(tmp_path)
    publish(source, *range(5))

    async def check() -> None:
        async with following(tmp_path) as prefixes:
            await until(lambda: known(prefixes) == 5)
            source.close()
            other = publisher(tmp_path)
            publish(other, *range(20, 20 + count))
            await until(lambda: known(prefixes, 20) == count and known(prefixes) == 0, other)
            publish(other, 30)
            await until(lambda: known(prefixes, 30) == 1)
            assert known(prefixes, 20) == count
            other.close()

    asyncio.run(asyncio.wait_for(check(), LONGEST))


@pytest.mark.parametrize("replay", [True, False])
def test_a_number_that_was_there_before_says_that_the_server_has_restarted(tmp_path, replay):
    """Without a new connection, as behind a program that passes messages on."""
    source = publisher(tmp_path)

    async def check() -> None:
        async with following(tmp_path, replay) as prefixes:
            await hear(prefixes, source)
            publish(source, *range(5))
            await until(lambda: known(prefixes) == 5)
            source._next = 0
            source._buffer.clear()
            publish(source, 20, 21)
            await until(lambda: known(prefixes, 20) == 2)
            assert known(prefixes) == 0

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    source.close()


def test_a_connection_that_breaks_and_a_check_that_fails_lose_nothing(tmp_path):
    source = publisher(tmp_path)
    publish(source, *range(5))
    open_ends: list[asyncio.StreamWriter] = []
    is_cut, num_refused = False, 0

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ends.append(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_refused
        if is_cut:
            num_refused += 1
            writer.close()
            return
        there, back = await asyncio.open_unix_connection(f"{tmp_path}/events")
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async def check() -> None:
        nonlocal is_cut
        link = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = link.sockets[0].getsockname()[1]
        async with following(tmp_path, events=f"tcp://127.0.0.1:{port}") as prefixes:
            await until(lambda: known(prefixes) == 5)
            await hear(prefixes, source)
            is_cut = True
            for end in open_ends:
                end.close()
            publish(source, 5, 6)
            await until(lambda: num_refused > 0)
            assert known(prefixes) == 5
            is_cut = False
            await until(lambda: known(prefixes) == 7)
            await hear(prefixes, source)
            prefixes.forget(0)
            assert known(prefixes) == 0
            publish(source, 7)
            await until(lambda: known(prefixes) == 8)
            link.close()
            for end in open_ends:
                end.close()

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    source.close()


def test_replicas_of_a_server_have_blocks_of_their_own(tmp_path):
    sources = [publisher(tmp_path, rank) for rank in range(2)]
    publish(sources[0], *range(3))
    publish(sources[1], *range(5), 20)

    async def check() -> None:
        async with following(tmp_path, ranks=2) as prefixes:
            await until(lambda: known(prefixes) == 5)
            await hear(prefixes, sources[1], 1)
            sources[1].send([AllBlocksCleared()])
            await until(lambda: known(prefixes, 20) == 0)
            assert known(prefixes) == 3

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    for source in sources:
        source.close()


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [[b""]],
        [[b"", b"1", b"x"]],
        [[b"", bytes(8), b"no batch"], [b"", END_OF_REPLAY, b""]],
        [[b"", bytes(8), b""], [b"", bytes(7) + b"\1", b"\x93\xc0"], [b"", END_OF_REPLAY]],
        [[END_OF_REPLAY]],
        [[b"", b"", b"", b""]],
    ],
)
def test_a_replay_without_meaning_stops_nothing(tmp_path, caplog, monkeypatch, answers):
    monkeypatch.setattr(cached, "_REPLAY_SECONDS", 0.2)
    source = KVEventPublisher(KVEventOptions(True, endpoint=f"ipc://{tmp_path}/events"), 0)
    context = zmq.Context()
    replay = context.socket(zmq.ROUTER)
    replay.bind(f"ipc://{tmp_path}/replay")

    def answer() -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                client = replay.recv_multipart()[0]
                for frames in answers:
                    replay.send_multipart([client, *frames])
        replay.close(linger=0)

    thread = threading.Thread(target=answer)
    thread.start()

    async def check() -> None:
        async with following(tmp_path) as prefixes:
            await until(lambda: "server 0 cannot be re" in caplog.text)
            await hear(prefixes, source)
            publish(source, *range(4))
            await until(lambda: known(prefixes) == 4)
            source._next += 3
            publish(source, 20)
            await until(lambda: known(prefixes, 20) == 1)
            assert known(prefixes) == 0

    asyncio.run(asyncio.wait_for(check(), LONGEST))
    source.close()
    context.term()
    thread.join()
