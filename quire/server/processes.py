"""Several API processes that share the port and the cores. Their parent starts them and replaces lost ones."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from quire.config.engine import ConfigError, EngineConfig, ServerConfig
from quire.engine.core_client import CoreClient
from quire.engine.cores import MAX_FAILED_STARTS, Cores
from quire.messages.engine import CoreDied, CoreEvent, CoreLost, CoreUp
from quire.messages.errors import EngineDeadError, error_text
from quire.observability.exposition import SHARED_FOLDER
from quire.observability.logging import LogOptions, configure_logging, log_options, logger
from quire.platform.folders import private_folder
from quire.platform.termination import end_if_told, end_signals
from quire.server.process_metrics import write_pid


class _ParentsCores:
    """The cores from the view of an API process: its parent monitors them and reports their state."""

    def __init__(self, connection: Connection, replicas: range) -> None:
        self._connection = connection
        self._replicas = replicas
        self.process_ids: list[int | None] = [None for _ in replicas]

    async def run(self, tell: Callable[[CoreEvent], None]) -> None:
        ended = asyncio.Event()

        def read() -> None:
            try:
                tell(self._connection.recv())
            except (EOFError, OSError):
                asyncio.get_running_loop().remove_reader(self._connection.fileno())
                for rank in self._replicas:
                    tell(CoreLost(rank, CoreDied("the parent of the API process has ended"), given_up=True))
                ended.set()

        asyncio.get_running_loop().add_reader(self._connection.fileno(), read)
        await ended.wait()

    def kill(self) -> None:
        """Do nothing, since the cores belong to the parent."""


def _run_api(
    connection: Connection,
    listening: socket.socket,
    config: ServerConfig,
    engine_config: EngineConfig,
    directory: Path,
    index: int,
    is_first_start: bool,
    log: LogOptions,
) -> None:
    """The main function of an API process. It sends its parent the log line when it serves, and an exception if it
    fails."""
    os.setpgrp()  # the parent forwards the terminal's signals
    configure_logging(*log)
    try:
        from quire.server.http_server import run  # metrics need the folder that the parent put into the environment

        cores = _ParentsCores(connection, engine_config.layout.served)
        client = CoreClient(engine_config, directory, cores, index=index, since_start=is_first_start)
        sys.exit(run(client, config, listening, connection.send))
    except (ValueError, OSError, EngineDeadError) as error:
        kind = EngineDeadError if isinstance(error, EngineDeadError) else ConfigError
        connection.send(kind(error_text(error)))
    except Exception:
        logger.exception("The API process failed")
        sys.exit(1)


class _Api:
    """An API process, to which the parent reports changes of the cores. news: its messages, until it has ended."""

    def __init__(self, listening: socket.socket, index: int, is_first_start: bool, *options: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.news: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.process = context.Process(
            target=_run_api,
            args=(theirs, listening, *options, index, is_first_start, log_options()),
            name=f"api {index}",
        )
        self.process.start()
        theirs.close()
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self._read)

    def tell(self, event: CoreEvent) -> None:
        try:
            self.connection.send(event)
        except OSError:
            return  # it has ended

    def _read(self) -> None:
        try:
            self.news.put_nowait(self.connection.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            self.news.put_nowait(None)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.connection.fileno())
        self.connection.close()
        self.process.kill()
        self.process.join()


class ApiProcesses:
    """The parent of `api_server_count` API processes and of the cores."""

    def __init__(self, cores: Cores, config: ServerConfig, listening: socket.socket) -> None:
        """Raises ConfigError for options that require a single API process."""
        self._cores = cores
        self._config = config
        self._listening = listening
        self._up: dict[int, CoreUp] = {}
        self._apis: dict[int, _Api] = {}
        self._serving: set[int] = set()
        self._is_ending = False

    async def run(self) -> int:
        """Serve until a signal, or until the engine has failed. Returns the exit status. Raises ConfigError or
        EngineDeadError if the start fails."""
        for number in end_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        end_if_told()
        folder = private_folder("quire-metrics-")
        os.environ[SHARED_FOLDER] = str(folder)
        watcher = asyncio.create_task(self._cores.run(self._told))
        try:
            async with asyncio.TaskGroup() as tasks:
                kept = [tasks.create_task(self._keep(index)) for index in range(self._config.api_server_count)]
            return max(task.result() for task in kept)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for api in self._apis.values():
                api.close()
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            shutil.rmtree(folder, ignore_errors=True)

    async def _keep(self, index: int) -> int:
        """Run an API process, and replace it whenever it is lost. Returns the exit status of the last one."""
        failed_starts = 0
        is_first_start = True
        while True:
            options = (self._config, self._cores.config, self._cores.directory)
            api = self._apis[index] = _Api(self._listening, index, is_first_start, *options)
            write_pid(f"api {index}", api.process.pid)
            for event in self._up.values():
                api.tell(event)
            failed_starts = failed_starts + 1
            is_first_start = False
            while (news := await api.news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                failed_starts = 0
                self._serves(index, news)
            await asyncio.to_thread(api.process.join)
            status = api.process.exitcode or 0
            if self._is_ending or status == 1:  # all other processes will also notice that the engine has failed
                return status
            if failed_starts == MAX_FAILED_STARTS:
                raise EngineDeadError(f"API process {index} cannot be started (exit code {status})")
            logger.error("API process %d was lost (exit code %d); starting another", index, status)

    def _serves(self, index: int, line: str) -> None:
        """Log the line when all processes serve for the first time."""
        count = self._config.api_server_count
        if index not in self._serving:
            self._serving.add(index)
            if len(self._serving) == count:
                logger.info("%s, %d API processes", line, count)

    def _told(self, event: CoreEvent) -> None:
        if isinstance(event, CoreUp):
            self._up[event.rank] = event
            for rank, pid in zip(self._cores.config.layout.here, self._cores.process_ids, strict=True):
                write_pid(f"core {rank}", pid)
        else:
            self._up.pop(event.rank, None)
        for api in self._apis.values():
            api.tell(event)

    def _signalled(self, number: int) -> None:
        self._is_ending = True
        self._listening.close()  # otherwise new clients would wait
        for api in self._apis.values():
            if api.process.pid is not None and api.process.is_alive():
                os.kill(api.process.pid, number)
                os.kill(api.process.pid, signal.SIGCONT)  # it may have been stopped
