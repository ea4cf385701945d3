"""The store of /v1/responses: SQLite, or a PostgreSQL database that several servers share.

Both accept the same SQL, so one class serves both. A response belongs to the owner that stored it, and no other owner
can read or delete it. When the store exceeds its limit in bytes, it deletes the least recently used responses. It also
deletes responses that were not used for too long.
"""

import asyncio
import hashlib
import re
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.config.engine import ConfigError, ServerConfig
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.platform.extras import install_command
from quire.platform.folders import state_folder

ROW_BYTES = 256  # approximate size of a row without its record
LOCK_SECONDS = 10  # time for another server to finish its write
_BATCH = 64  # rows that are deleted at once

_TABLES = Path(__file__).with_name("response_tables.sql").read_text(encoding="utf-8")
_CHAIN = Path(__file__).with_name("response_chain.sql").read_text(encoding="utf-8")  # a response and its predecessors

T = TypeVar("T")


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}_{secrets.token_hex(24)}"


def is_made(response_id: str) -> bool:
    """Whether an id has the format of server-generated response ids."""
    return re.fullmatch(r"resp_[0-9a-f]{48}", response_id) is not None


def key_of(owner: str, response_id: str) -> str:
    """Return the key of a response in the store. Server-generated ids are unique. An id that a client chose is combined
    with its owner, since other owners may choose the same."""
    if is_made(response_id):
        return response_id
    return "own_" + hashlib.sha256(f"{owner}\n{response_id}".encode()).hexdigest()


class StoreError(Exception):
    """The database failed. The message has the details."""


class MissingResponseError(LookupError):
    """The owner has no response with the id, which is the error's only argument."""


class Record(msgspec.Struct):
    """A stored response."""

    response: dict[str, Any]  # as sent to the client
    input: list[dict[str, Any]]  # its own input items, without those of previous responses
    used: float = 0.0  # set by the store: when it was last stored or continued, in seconds
    size: int = 0  # set by the store: size of the record in bytes

    @property
    def is_running(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")

    @property
    def items(self) -> list[dict[str, Any]]:
        return [*self.input, *self.response["output"]]


@dataclass(frozen=True)
class Database:
    """The differences between databases.

    connect: opens a connection without automatic transactions. error: the class of the driver's errors. mark: the
    placeholder of a parameter. begin: the statement that starts a transaction; transactions are serialized, across
    processes too. blob: the column type for bytes.
    """

    connect: Callable[[], Any]
    error: type[Exception]
    mark: str
    begin: str
    blob: str


def sqlite(path: Path | None) -> Database:
    """Return a database in a file that only this user can read, or in memory without a path."""

    def connect() -> sqlite3.Connection:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
        name = ":memory:" if path is None else path
        connection = sqlite3.connect(name, LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    return Database(connect, sqlite3.Error, "?", "BEGIN IMMEDIATE", "BLOB")


def postgres(url: str) -> Database:
    """Return a PostgreSQL database. Raises ConfigError if its driver is not installed."""
    try:
        import psycopg
    except ImportError as error:
        reason = error_text(error)
        raise ConfigError(f"response_store: a PostgreSQL needs {install_command('postgres')} ({reason})") from error
    limits: Any = {"connect_timeout": LOCK_SECONDS, "tcp_user_timeout": LOCK_SECONDS * 1000}

    def connect() -> Any:
        connection = psycopg.connect(url, autocommit=True, prepare_threshold=None, **limits)
        connection.execute(f"SET statement_timeout = '{LOCK_SECONDS}s'")
        connection.execute("SET client_min_messages = warning")  # no notices about tables that already exist
        return connection

    # An advisory lock: it works before the tables exist, and ends with the transaction.
    return Database(connect, psycopg.Error, "%s", "BEGIN; SELECT pg_advisory_xact_lock(7821340)", "BYTEA")


class ResponseStore:
    """Responses by owner and id. Its methods are called through `call`, which waits for the database, or `run`."""

    def __init__(self, database: Database, max_bytes: int, max_age: float, may_use_memory: bool = False) -> None:
        """max_bytes: of all records. max_age: seconds since a response was last used. may_use_memory: if the database
        cannot be opened, log a warning and use memory instead."""
        self.database = database
        self.max_bytes = max_bytes
        self.max_age = max_age
        self._may_use_memory = may_use_memory
        self._connection: Any = None
        self._thread = ThreadPoolExecutor(1, "response-store")

    async def run(self, method: Callable[..., T], *arguments: Any) -> T:
        """Run `call` in the store's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.call, method, *arguments)

    def call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method in a transaction. If the database fails, call it again with a new connection, since the
        database may have been restarted. Raises StoreError, and the method's own errors."""
        for is_last in (False, True):
            try:
                result = self._transact(method, *arguments)
                self._may_use_memory = False  # from here on, responses in the database would be lost
                return result
            except (self.database.error, OSError) as error:
                self._disconnect()
                if is_last and not self._may_use_memory:
                    raise StoreError(error_text(error)) from error
                problem = error
        logger.warning("Responses are kept in memory until the server ends (--response-store): %s", error_text(problem))
        self.database = sqlite(None)
        self._may_use_memory = False
        return self.call(method, *arguments)

    def close(self) -> None:
        self._thread.submit(self._disconnect).result()
        self._thread.shutdown()

    def open(self) -> None:
        """Connect, count the size again (rows may have been deleted by hand), and delete responses above the limits."""
        size = "(SELECT COALESCE(SUM(size), 0) FROM quire_responses)"
        self._execute(f"UPDATE quire_responses_size SET total = {size}")
        self._trim()

    def put(self, owner: str, record: Record) -> None:
        """Store a new response, or the new state of one."""
        encoded = msgspec.json.encode(record)
        size = len(encoded) + ROW_BYTES
        if size > self.max_bytes:
            raise StoreError(f"a response of {size} bytes is larger than the whole store (--response-store-bytes)")
        key = key_of(owner, record.response["id"])
        previous = record.response["previous_response_id"]
        self._remove("id = ?", key)
        row = (key, owner, previous and key_of(owner, previous), time.time(), size, encoded)
        self._execute("INSERT INTO quire_responses VALUES (?, ?, ?, ?, ?, ?)", *row)
        self._execute("UPDATE quire_responses_size SET total = total + ?", size)
        self._trim()

    def replace(self, owner: str, record: Record) -> bool:
        """Store the new state of a response. Returns False if it is no longer running because it was cancelled or
        deleted."""
        stored = self._select(owner, record.response["id"])
        is_running = stored is not None and stored.is_running
        if is_running:
            self.put(owner, record)
        return is_running

    def get(self, owner: str, response_id: str) -> Record:
        """Raises MissingResponseError."""
        record = self._select(owner, response_id)
        if record is None:
            raise MissingResponseError(response_id)
        return record

    def chain(self, owner: str, response_id: str) -> list[Record]:
        """Return the response and the stored responses that it continues, oldest first.

        Resets their age. Raises MissingResponseError if the response itself is not stored.
        """
        rows = self._execute(_CHAIN, key_of(owner, response_id), owner, self._oldest, owner).fetchall()
        if not rows:
            raise MissingResponseError(response_id)
        for row in rows:
            self._execute("UPDATE quire_responses SET used = ? WHERE id = ?", time.time(), row[0])
        return [_record(used, encoded) for _, used, encoded in rows]

    def delete(self, owner: str, response_id: str) -> None:
        """Raises MissingResponseError."""
        if self._select(owner, response_id) is None:
            raise MissingResponseError(response_id)
        self._remove("id = ?", key_of(owner, response_id))

    @property
    def _oldest(self) -> float:
        """Return the time before which a response is too old."""
        return time.time() - self.max_age

    def _select(self, owner: str, response_id: str) -> Record | None:
        where = "id = ? AND owner = ? AND used >= ?"
        parameters = (key_of(owner, response_id), owner, self._oldest)
        row = self._execute(f"SELECT used, record FROM quire_responses WHERE {where}", *parameters).fetchone()
        return None if row is None else _record(*row)

    def _trim(self) -> None:
        self._remove("used < ?", self._oldest)
        while (excess := self._execute("SELECT total FROM quire_responses_size").fetchone()[0] - self.max_bytes) > 0:
            rows = self._execute(f"SELECT id, size FROM quire_responses ORDER BY used, id LIMIT {_BATCH}").fetchall()
            for response_id, size in rows:
                if excess > 0:
                    self._remove("id = ?", response_id)
                    excess -= size

    def _remove(self, where: str, parameter: Any) -> None:
        size = f"(SELECT COALESCE(SUM(size), 0) FROM quire_responses WHERE {where})"
        self._execute(f"UPDATE quire_responses_size SET total = total - {size}", parameter)
        self._execute(f"DELETE FROM quire_responses WHERE {where}", parameter)

    def _transact(self, method: Callable[..., T], *arguments: Any) -> T:
        tables: list[str] = []
        if self._connection is None:
            self._connection = self.database.connect()
            tables = _TABLES.format(blob=self.database.blob).split(";")
        self._execute(self.database.begin)
        try:
            for statement in tables:
                self._execute(statement)
            result = method(*arguments)
            self._execute("COMMIT")
        except BaseException:
            with suppress(self.database.error):
                self._execute("ROLLBACK")
            raise
        return result

    def _execute(self, sql: str, *parameters: Any) -> Any:
        # PostgreSQL accepts several statements in one call only without parameters.
        return self._connection.execute(sql.replace("?", self.database.mark), *([parameters] if parameters else []))

    def _disconnect(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            with suppress(self.database.error):
                connection.close()


def _record(used: float, encoded: bytes) -> Record:
    record = msgspec.json.decode(encoded, type=Record)
    record.used = used
    record.size = len(encoded)
    return record


def open_store(config: ServerConfig) -> ResponseStore:
    """Return the store. A store that the options name is opened at once. Raises ConfigError if it cannot be opened.

    The default store is a file in the user's state folder, which is opened at first use. If that fails, responses are
    kept in memory.
    """
    given = config.response_store
    if given is None:
        folder = state_folder()
        if folder is None:
            logger.warning(
                "Responses are kept in memory until the server ends: the user has no home (--response-store)"
            )
        database = sqlite(folder and folder / "responses.sqlite3")
    elif given.startswith(("postgresql://", "postgres://")):
        database = postgres(given)
    else:
        database = sqlite(None if given == "memory" else Path(given))
    store = ResponseStore(
        database, config.response_store_bytes, config.response_store_days * 86400, may_use_memory=given is None
    )
    try:
        if given is not None:
            store.call(store.open)
    except StoreError as error:
        raise ConfigError(f"response_store cannot be opened: {error_text(error)}") from error
    return store
