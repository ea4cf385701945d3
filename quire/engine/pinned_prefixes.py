"""Prefixes that stay in the prefix caches of all cores until they are unpinned."""

import asyncio
from collections.abc import Awaitable, Callable

from quire.engine.core_client import CoreClient
from quire.engine.processor import PromptFields
from quire.messages.changes import PinPrefix, UnpinPrefix
from quire.messages.errors import EngineDeadError, error_text
from quire.messages.lora import Adapter
from quire.observability.logging import logger
from quire.platform.untrusted.limits import BusyError

Compute = Callable[[str, PromptFields, int, Adapter | None], Awaitable[None]]


class PinnedPrefixes:
    """The pinned prefixes by id.

    They are recomputed after a cache reset, after a weight update, and by a core that replaces another.
    """

    def __init__(self, client: CoreClient, compute: Compute) -> None:
        """compute: computes a prompt on a core, given the name, the prompt, the core and the adapter."""
        self.by_id: dict[str, PinPrefix] = {}
        self._client = client
        self._compute = compute
        self._tasks: set[asyncio.Task[None]] = set()

    async def pin(self, prefix: PinPrefix) -> None:
        """Pin a prefix in all cores. Raises ValueError if there is no room."""
        self.by_id[prefix.id] = prefix
        try:
            await asyncio.gather(*(self._pin(prefix, core) for core in self._client.ready))
        except ValueError:
            await self.unpin(prefix.id)
            raise

    async def unpin(self, prefix_id: str) -> bool:
        """Unpin a prefix. Returns False for an unknown id."""
        if self.by_id.pop(prefix_id, None) is None:
            return False
        await self._client.carry_out(UnpinPrefix(prefix_id))
        return True

    async def _pin(self, prefix: PinPrefix, core: int) -> None:
        prompt: PromptFields = {"prompt_token_ids": prefix.token_ids}
        if prefix.cache_salt is not None:
            prompt["cache_salt"] = prefix.cache_salt
        await self._compute(prefix.id, prompt, core, prefix.adapter)
        await self._client.carry_out_at(core, prefix)
        if prefix.id not in self.by_id:  # deleted meanwhile
            await self._client.carry_out_at(core, UnpinPrefix(prefix.id))

    def pin_again(self, *cores: int) -> None:
        """Compute and pin all prefixes again, concurrently with other requests."""

        async def pin() -> None:
            for core in cores:
                for prefix in list(self.by_id.values()):
                    try:
                        await self._pin(prefix, core)
                    except (ValueError, BusyError, EngineDeadError) as error:
                        logger.warning("The prefix %s is not pinned any more: %s", prefix.id, error_text(error))

        if self.by_id:
            task = asyncio.create_task(pin(), name="pin prefixes")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Stop pinning again."""
        for task in self._tasks:
            task.cancel()
