"""Starts and stops profiles in all cores. Only the cores store which profile runs, so one API process may start it and
another may stop it."""

import asyncio
import time
from dataclasses import asdict
from secrets import token_hex
from typing import TYPE_CHECKING

from msgspec import structs

from quire.config.engine import EngineConfig
from quire.config.profiler import ProfilerConfig
from quire.messages.changes import Profile
from quire.observability.logging import logger

if TYPE_CHECKING:  # imports zmq, which LLM does not need
    from quire.engine.core_client import CoreClient


def start_order(config: EngineConfig, prefix: str | None) -> Profile:
    """Return the order that starts a profile. prefix: the prefix of its file names; None for the current time.

    Raises ValueError if the options name no profiler, or for a prefix that cannot be part of a file name.
    """
    options = ProfilerConfig.read(config.profile.profiler_config)
    if options.profiler is None:
        raise ValueError(
            "no profiler is chosen; start the engine with profiler_config, such as "
            '{"profiler": "torch", "torch_profiler_dir": "traces"}'
        )
    name = f"{prefix or time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"
    if prefix and not prefix.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ValueError(f"profile_prefix must consist of letters, digits, '-', '_' and '.', got {prefix!r}")
    # With ranks on other machines, the core's process must respond to them in time, which it cannot do while it writes.
    has_core = config.parallel.ranks > 1 and config.layout.machines == 1 and not config.cluster.uses_ray
    return Profile("start", name, has_core=has_core, options=asdict(options))


def stop_order() -> Profile:
    """Return the order that stops the running profile."""
    return Profile("stop")


async def start(client: "CoreClient", prefix: str | None) -> None:
    """Start a profile in all cores, or in none. Raises ValueError."""
    order = start_order(client.config, prefix)
    problems = await _tell(client, order)
    if problems:
        await _tell(client, Profile("drop", order.name))
        raise ValueError(problems[0])


async def stop(client: "CoreClient") -> int:
    """Stop the profile in all cores. Returns how many of them have written their traces. Raises ValueError if none has.
    Parts of the profile that were lost with a core are logged."""
    restarts = client.restarts
    ready = len(client.ready)
    problems = await _tell(client, stop_order())
    if len(problems) == ready:
        raise ValueError(problems[0])
    lost = client.restarts - restarts
    if problems or lost:
        reasons = "; ".join([*dict.fromkeys(problems), *(["it was lost meanwhile"] if lost else [])])
        logger.warning("The profile lacks %d of %d cores: %s", len(problems) + lost, ready, reasons)
    return ready - len(problems) - lost


async def _tell(client: "CoreClient", order: Profile) -> list[str]:
    """Let all cores execute an order. Returns the problems."""
    client.check()
    if not client.ready:
        raise ValueError("no engine core is ready; try again when one is")
    orders = [(core, structs.replace(order, replica=client.first + core)) for core in client.ready]
    ended = await asyncio.gather(*(client.carry_out_at(*pair) for pair in orders), return_exceptions=True)
    for result in ended:
        if isinstance(result, BaseException) and not isinstance(result, ValueError):
            raise result
    return [str(result) for result in ended if result is not None]
