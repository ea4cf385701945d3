"""The store of responses: who may read what, its bounds, several processes, and processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.config.engine import ConfigError, ServerConfig
from quire.server.response_store import (
    ROW_BYTES,
    Database,
    MissingResponseError,
    Record,
    ResponseStore,
    StoreError,
    key_of,
    open_store,
    postgres,
    sqlite,
)
from support.postgres import Postgres, running_postgres
from support.waiting import LONGEST

DAY = 86400.0


class Store:
    """A store whose methods are called directly."""

    def __init__(self, database: Database, max_bytes: int = 1 << 20, max_age: float = DAY) -> None:
        self.store = ResponseStore(database, max_bytes, max_age)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return method if name == "close" else partial(self.store.call, method)


FORK = multiprocessing.get_context("spawn")
OpenStore = Callable[..., Store]


def calling(store: ResponseStore) -> Store:
    wrapped = Store(store.database)
    wrapped.store = store
    return wrapped


def record(response_id: str, previous: str | None = None, size: int = 10, status: str = "completed") -> Record:
    response = {"id": response_id, "previous_response_id": previous, "status": status, "text": "x" * size}
    return Record(response, [{"type": "message", "id": f"msg_{response_id}"}])


def ids(records: list[Record]) -> list[str]:
    return [record.response["id"] for record in records]


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["memory", "file", pytest.param("postgres", marks=pytest.mark.slow)])
def database(request, tmp_path) -> Database:
    if request.param != "postgres":
        return sqlite(None if request.param == "memory" else tmp_path / "responses.sqlite3")
    found = postgres(request.getfixturevalue("server").url)
    with closing(found.connect()) as connection:
        connection.execute("DROP TABLE IF EXISTS quire_responses, quire_responses_size")
    return found


@pytest.fixture
def open_one(database: Database) -> Iterator[OpenStore]:
    """Opens stores that are closed at the end of the test."""
    stores = []

    def open_one(max_bytes: int = 1 << 20, max_age: float = DAY) -> Store:
        stores.append(Store(database, max_bytes, max_age))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(open_one: OpenStore) -> Store:
    return open_one()


def test_a_stored_response_is_read_as_it_was_written(store):
    store.put("owner", record("a"))
    found = store.get("owner", "a")
    assert (found.response, found.input) == (record("a").response, record("a").input)
    assert abs(found.used - time.time()) < 60


def test_nobody_but_its_owner_finds_or_deletes_a_response(store):
    store.put("owner", record("a"))
    store.put("other", record("b", previous="a"))
    for method in (store.get, store.chain, store.delete):
        with pytest.raises(MissingResponseError, match="a"):
            method("other", "a")
    assert not store.replace("other", record("a", status="in_progress"))
    assert ids(store.chain("other", "b")) == ["b"]
    assert store.get("owner", "a")


def test_a_deleted_response_is_gone(store):
    store.put("owner", record("a"))
    store.delete("owner", "a")
    with pytest.raises(MissingResponseError):
        store.get("owner", "a")
    with pytest.raises(MissingResponseError):
        store.delete("owner", "a")


def test_a_chain_begins_with_its_first_response_and_branches(store):
    for name, previous in [("a", None), ("b", "a"), ("c", "b"), ("d", "a")]:
        store.put("owner", record(name, previous))
    assert ids(store.chain("owner", "c")) == ["a", "b", "c"]
    assert ids(store.chain("owner", "d")) == ["a", "d"]
    store.delete("owner", "a")
    assert ids(store.chain("owner", "c")) == ["b", "c"]


def test_only_a_running_response_can_be_replaced(store):
    assert not store.replace("owner", record("a"))
    store.put("owner", record("a", status="queued"))
    assert store.replace("owner", record("a", status="cancelled"))
    assert not store.replace("owner", record("a", status="completed"))
    assert store.get("owner", "a").response["status"] == "cancelled"


def test_responses_that_are_too_old_are_not_found_and_are_deleted(open_one, monkeypatch):
    young = open_one(max_age=0.5)
    young.put("owner", record("a"))
    later = time.time() + 0.6
    monkeypatch.setattr("quire.server.response_store.time", SimpleNamespace(time=lambda: later))
    with pytest.raises(MissingResponseError):
        young.get("owner", "a")
    old = open_one()
    young.put("owner", record("b"))
    with pytest.raises(MissingResponseError):
        old.get("owner", "a")


def test_a_conversation_that_goes_on_does_not_lose_its_beginning(open_one):
    size = 1000
    store = open_one(max_bytes=5 * (size + ROW_BYTES + 200))
    store.put("owner", record("a", size=size))
    previous = "a"
    for index in range(3):
        store.put("owner", record(f"other-{index}", size=size))
        assert store.chain("owner", previous)
        store.put("owner", record(f"a{index}", previous, size=size))
        previous = f"a{index}"
    assert ids(store.chain("owner", previous)) == ["a", "a0", "a1", "a2"]
    with pytest.raises(MissingResponseError):
        store.get("owner", "other-0")


def test_a_response_that_is_larger_than_the_store_is_refused_and_deletes_nothing(open_one):
    store = open_one(max_bytes=5000)
    store.put("owner", record("a"))
    with pytest.raises(StoreError, match="larger than the whole store"):
        store.put("owner", record("b", size=6000))
    assert store.get("owner", "a")


def test_the_size_is_counted_again_when_the_store_is_opened(store):
    store.store.max_bytes = 5000
    store.put("owner", record("a", size=3000))
    store._execute("DELETE FROM quire_responses")  # by hand, without the count
    store.open()
    for name, size in [("b", 3000), ("c", 10)]:
        store.put("owner", record(name, size=size))
    assert store.get("owner", "b")


class BoundedStore(RuleBasedStateMachine):
    """Against a list in memory: what is found is right, and the bounds hold after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.database = sqlite(None)
        self.store = Store(self.database, 4000, DAY)
        self.sizes: dict[str, int] = {}  # of what was stored, in the order of its last use

    def teardown(self) -> None:
        self.store.close()

    @rule(name=st.sampled_from("abcdefgh"), size=st.integers(0, 2000))
    def put(self, name: str, size: int) -> None:
        self.store.put("owner", record(name, size=size))
        self.sizes.pop(name, None)
        self.sizes[name] = size

    @rule(name=st.sampled_from("abcdefgh"))
    def delete(self, name: str) -> None:
        try:
            self.store.delete("owner", name)
        except MissingResponseError:
            assert key_of("owner", name) not in self.found
        self.sizes.pop(name, None)

    @rule(name=st.sampled_from("abcdefgh"))
    def use(self, name: str) -> None:
        try:
            [found] = self.store.chain("owner", name)
        except MissingResponseError:
            assert key_of("owner", name) not in self.found
        else:
            assert len(found.response["text"]) == self.sizes[name]
            self.sizes[name] = self.sizes.pop(name)

    @property
    def found(self) -> list[str]:
        return [row[0] for row in self.store._execute("SELECT id FROM quire_responses ORDER BY used")]

    @invariant()
    def the_bound_holds_and_the_latest_are_kept(self) -> None:
        stored, counted = self.store._execute("SELECT COALESCE(SUM(size), 0), COUNT(*) FROM quire_responses").fetchone()
        [total] = self.store._execute("SELECT total FROM quire_responses_size").fetchone()
        assert stored == total <= 4000
        kept = list(self.sizes)[len(self.sizes) - counted :]
        assert set(self.found) == {key_of("owner", name) for name in kept}


BoundedStore.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBoundedStore = BoundedStore.TestCase


def _write_many(database: tuple[str, str], name: str, count: int, max_bytes: int) -> None:
    kind, place = database
    store = Store(postgres(place) if kind == "postgres" else sqlite(Path(place)), max_bytes, DAY)
    for index in range(count):
        store.put("owner", record(f"{name}-{index}", f"{name}-{index - 1}" if index else None, size=500))
        with suppress(MissingResponseError):  # the others may have filled the store since
            store.chain("owner", f"{name}-{index}")
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", pytest.param("postgres", marks=pytest.mark.slow)])
def test_several_processes_write_to_one_store_within_its_bounds(request, tmp_path, kind):
    """All of them create it, too."""
    if kind == "postgres":
        place = request.getfixturevalue("server").url
        with closing(postgres(place).connect()) as connection:
            connection.execute("DROP TABLE IF EXISTS quire_responses, quire_responses_size")
    else:
        place = str(tmp_path / "responses.sqlite3")
    limit = 60_000
    writers = [FORK.Process(target=_write_many, args=((kind, place), f"w{i}", 40, limit)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(LONGEST)
        assert writer.exitcode == 0
    store = Store(postgres(place) if kind == "postgres" else sqlite(Path(place)), limit, DAY)
    size, rows = store._execute("SELECT SUM(size), COUNT(*) FROM quire_responses").fetchone()
    [total] = store._execute("SELECT total FROM quire_responses_size").fetchone()
    assert size == total
    assert limit - 1000 < total <= limit
    assert rows < 160
    store.close()


def _write_until_killed(path: str) -> None:
    store = Store(sqlite(Path(path)), 200_000, DAY)
    for index in range(1_000_000):
        store.put("owner", record(f"r-{index}", size=20_000))


def test_a_store_whose_server_is_killed_while_it_writes_opens_and_is_whole(tmp_path):
    path = tmp_path / "responses.sqlite3"
    for size in (9_000, 100_000, 500_000):  # bytes, from which on it is killed
        writer = FORK.Process(target=_write_until_killed, args=(str(path),))
        writer.start()
        while not path.exists() or path.stat().st_size + sum(f.stat().st_size for f in tmp_path.glob("*-wal")) < size:
            time.sleep(0.001)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        store = Store(sqlite(path), 200_000, DAY)
        store.put("owner", record("after"))
        assert store.get("owner", "after")
        assert store._execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored, total = store._execute(
            "SELECT (SELECT SUM(size) FROM quire_responses), (SELECT total FROM quire_responses_size)"
        ).fetchone()
        assert stored == total <= 200_000
        store.close()


def test_a_file_does_not_grow_without_end(tmp_path):
    store = Store(sqlite(tmp_path / "responses.sqlite3"), 200_000, DAY)
    for index in range(300):
        store.put("owner", record(f"r-{index}", size=10_000))
    store.close()
    assert (tmp_path / "responses.sqlite3").stat().st_size < 400_000


def test_the_default_is_a_file_of_this_user_alone_that_is_made_at_its_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store = calling(open_store(ServerConfig.create()))
    assert not list(tmp_path.iterdir())
    store.put("owner", record("a"))
    path = tmp_path / "quire" / "responses.sqlite3"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.close()
    again = calling(open_store(ServerConfig.create()))
    assert again.get("owner", "a")
    again.close()


@pytest.mark.parametrize("obstacle", ["file for folder", "no database", "no home"])
def test_without_a_usable_file_responses_are_kept_in_memory_with_one_warning(tmp_path, monkeypatch, caplog, obstacle):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if obstacle == "file for folder":
        (tmp_path / "quire").write_text("")
    elif obstacle == "no database":
        (tmp_path / "quire").mkdir()
        (tmp_path / "quire" / "responses.sqlite3").write_text("This is not a database." * 100)
    else:
        monkeypatch.setattr("quire.server.response_store.state_folder", lambda: None)
    monkeypatch.setattr("quire.server.response_store.logger.propagate", True)
    store = calling(open_store(ServerConfig.create()))
    store.put("owner", record("a"))
    store.put("owner", record("b"))
    assert ids([store.get("owner", name) for name in "ab"]) == ["a", "b"]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "--response-store" in caplog.text
    store.close()


def test_a_store_that_was_asked_for_and_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "file").write_text("This is not a database." * 100)
    for given in (tmp_path / "file", tmp_path / "file" / "responses", tmp_path):
        with pytest.raises(ConfigError, match="response_store cannot be opened"):
            open_store(ServerConfig.create(response_store=str(given)))
    for name, value in [("response_store_bytes", 0), ("response_store_days", 0.0), ("response_store_days", -1.0)]:
        with pytest.raises(ConfigError, match=name):
            ServerConfig.create(**{name: value})


def test_a_database_that_fails_and_recovers_is_used_again(tmp_path):
    path = tmp_path / "responses.sqlite3"
    store = Store(sqlite(path), 1 << 20, DAY)
    store.put("owner", record("a"))
    store.store._connection.close()  # as if the connection were lost
    with pytest.raises(sqlite3.ProgrammingError):
        store.store._connection.execute("SELECT 1")
    assert store.get("owner", "a")
    store.close()


@pytest.mark.slow
def test_a_postgres_that_is_restarted_is_used_again(server):
    store = Store(postgres(server.url), 1 << 20, DAY)
    store.put("owner", record("before"))
    server.stop()
    with pytest.raises(StoreError):
        store.get("owner", "before")
    server.start()
    assert store.get("owner", "before")
    store.put("owner", record("after"))
    store.close()


@pytest.mark.slow
def test_a_postgres_that_cannot_be_reached_is_an_error_at_the_start(server):
    url = server.url.replace(f":{server.port}", ":1").replace("quire@", "quire:secret@")
    with pytest.raises(ConfigError, match="response_store cannot be opened") as caught:
        open_store(ServerConfig.create(response_store=url))
    assert "secret" not in str(caught.value)
