"""Regularly checks the servers' health, and their load from other clients."""

import asyncio
import contextlib
import json
import time

import aiohttp

from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.router.config import RouteConfig
from quire.router.fleet import Backend, Fleet

_LATE_SECONDS = 1.0  # if a check times out this much too late, this process itself was stopped


class HealthChecks:
    """Servers join the fleet after the first successful check, and leave it after several consecutive failures.

    key: the API key for the servers' /load.
    """

    def __init__(self, config: RouteConfig, fleet: Fleet, client: aiohttp.ClientSession, key: str | None) -> None:
        self._config = config
        self._fleet = fleet
        self._client = client
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=config.health_check_timeout)
        self._failures = dict.fromkeys(fleet.backends, 0)
        self._tells_load = dict.fromkeys(fleet.backends, config.policy != "round-robin")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check all servers once, and then regularly."""
        await asyncio.gather(*(self._check(backend) for backend in self._fleet.backends))
        self._tasks = [asyncio.create_task(self._repeat(backend)) for backend in self._fleet.backends]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _repeat(self, backend: Backend) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_check_interval):
                    await backend.recheck.wait()
            backend.recheck.clear()
            await self._check(backend)

    async def _check(self, backend: Backend) -> None:
        began = time.monotonic()
        reason, silent = await self._failure(backend)
        if reason is None:
            self._failures[backend] = 0
            await self._ask_load(backend)
            if self._config.by_model:
                await self._ask_models(backend)
            self._fleet.join(backend)
            return
        if silent and time.monotonic() - began > self._config.health_check_timeout + _LATE_SECONDS:
            return  # not caused by the server
        self._failures[backend] += 1
        if self._failures[backend] >= self._config.health_failure_threshold:
            self._fleet.leave(backend, reason)
            if silent:
                self._fleet.give_up(backend)

    async def _failure(self, backend: Backend) -> tuple[str | None, bool]:
        """Return (why a server is not healthy, or None if it is; whether it is silent).

        A process that has ended is not silent, since its connections break.
        """
        try:
            async with self._client.get(f"{backend.url}/health", timeout=self._timeout) as response:
                await response.read()
                return (None if response.status == 200 else f"/health answers with status {response.status}"), False
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            if refused:  # it has ended or is about to, so there is no point in asking again
                self._failures[backend] = self._config.health_failure_threshold
            return error_text(error), not refused
        except TimeoutError:
            return f"/health does not answer within {self._config.health_check_timeout:g} s", True
        except (aiohttp.ClientError, OSError) as error:
            return error_text(error), False

    async def _ask_models(self, backend: Backend) -> None:
        """Query which models a server has. If this fails, the previous answer stays valid."""
        try:
            url = f"{backend.url}/v1/models"
            async with self._client.get(url, headers=self._headers, timeout=self._timeout) as response:
                answer = json.loads(await response.read())
            backend.models = {str(entry["id"]): entry for entry in answer["data"]}
        except (ValueError, TypeError, KeyError, aiohttp.ClientError, OSError) as error:
            logger.warning("%s/v1/models does not list its models: %s", backend.url, error_text(error))

    async def _ask_load(self, backend: Backend) -> None:
        """Query how many of a server's requests did not come from this proxy. Servers without this endpoint are not
        asked again."""
        if not self._tells_load[backend]:
            return
        try:
            url = f"{backend.url}/load"
            async with self._client.get(url, headers=self._headers, timeout=self._timeout) as response:
                answer = json.loads(await response.read()) if response.status == 200 else {}
            backend.elsewhere = max(0, int(answer["server_load"]) - backend.in_flight)
        except (ValueError, TypeError, KeyError):
            self._tells_load[backend] = False
        except (aiohttp.ClientError, OSError):
            return  # left to the next health check
        self._fleet.report(backend)
