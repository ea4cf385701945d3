"""The pictures of a chat request: they are fetched and decoded in threads, a few at a time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.engine.async_llm import AsyncLLM
from quire.engine.processor import Processor, PromptFields
from quire.messages.errors import error_text
from quire_server.errors import ApiError
from quire_server.messages import MEDIA_PARTS

Argument = TypeVar("Argument")
Result = TypeVar("Result")
AT_ONCE = 4  # items that are fetched or decoded at the same time, each of which may take hundreds of MB


@dataclass
class ChatMedia:
    """The media of a conversation. messages: with placeholders in their place."""

    messages: list[Any]
    data: dict[str, list[Any]] = field(default_factory=dict)
    uuids: dict[str, list[str | None]] = field(default_factory=dict)

    def prompt(self, text: str, kwargs: dict[str, Any] | None) -> str | PromptFields:
        if not self.data:
            return text
        return PromptFields(
            prompt=text, multi_modal_data=dict(self.data), multi_modal_uuids=dict(self.uuids),
            mm_processor_kwargs=kwargs or {},
        )  # fmt: skip

    def token_ids(self, processor: Processor, text: str) -> list[int]:
        """The tokens of a rendered conversation with its media. Raises ValueError."""
        assert processor.media is not None
        return processor.media.expand(text, self.data, self.uuids, add_special_tokens=False).token_ids


class MediaLoader:
    """Loads the media of requests for one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._media = llm.processor.media
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def load(self, messages: list[Any]) -> ChatMedia:
        """messages: as JSON objects, which have some. Raises ApiError, which names the part that cannot be used."""
        processor = self._media
        try:
            if processor is None:
                raise ValueError(f"{_first_part(messages)}: this model takes text only")
            rest, parts = processor.split(messages)
            for modality in {part.modality for part in parts}:
                processor.check_count(modality, sum(part.modality == modality for part in parts))
        except ValueError as error:
            raise _refusal(error) from error
        found = ChatMedia(rest)
        for part, item in zip(parts, await asyncio.gather(*map(self._load, parts)), strict=True):
            found.data.setdefault(part.modality, []).append(item)
            found.uuids.setdefault(part.modality, []).append(part.uuid)
        return found

    async def _load(self, part: Any) -> Any:
        assert self._media is not None
        try:
            return await self.in_turn(self._media.load, part)
        except ValueError as error:
            raise _refusal(error) from error

    async def in_turn(self, function: Callable[[Argument], Result], argument: Argument) -> Result:
        """Call a function that decodes, in a thread, and few of them at a time."""
        async with self._turns:
            return await asyncio.to_thread(function, argument)


def _first_part(messages: list[Any]) -> str:
    """The path of the first part that is no text."""
    return next(
        f"messages[{number}].content[{index}].{part['type']}"
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for index, part in enumerate(message["content"])
        if isinstance(part, dict) and part.get("type") in MEDIA_PARTS
    )


def _refusal(error: ValueError) -> ApiError:
    text = error_text(error)
    path = text.partition(": ")[0]
    return ApiError(400, text, param=path if path.startswith("messages[") else "messages")
