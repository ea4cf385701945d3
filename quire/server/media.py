"""The media of a chat request, a few at a time: they are fetched and preprocessed in threads, and decoded in worker
processes."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.engine.async_llm import AsyncLLM
from quire.engine.processor import Processor, PromptFields
from quire.messages.errors import error_text
from quire.multimodal.content import MediaPart
from quire.platform.untrusted.limits import BusyError
from quire.server.errors import ApiError
from quire.server.messages import MEDIA_PARTS

Result = TypeVar("Result")
AT_ONCE = 4  # items that are processed at the same time; each may take hundreds of MB


@dataclass
class ChatMedia:
    """The media of a conversation. messages: the messages with placeholders for the media. data: the preprocessed
    media.

    kwargs: preprocessing settings.
    """

    messages: list[Any]
    kwargs: dict[str, Any] | None = None
    data: dict[str, list[Any]] = field(default_factory=dict)
    uuids: dict[str, list[str | None]] = field(default_factory=dict)

    def prompt(self, text: str) -> str | PromptFields:
        if not self.data:
            return text
        return PromptFields(
            prompt=text,
            multi_modal_data=dict(self.data),
            multi_modal_uuids=dict(self.uuids),
            mm_processor_kwargs=self.kwargs or {},
        )

    def token_ids(self, processor: Processor, text: str) -> list[int]:
        """Return the tokens of a rendered conversation with its media. Raises ValueError."""
        assert processor.media is not None
        return processor.media.expand(text, self.data, self.uuids, self.kwargs, False).token_ids


class MediaLoader:
    """Loads the media of requests for one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._media = llm.processor.media
        self._threads = ThreadPoolExecutor(AT_ONCE, "media")
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.sounds = asyncio.Semaphore(AT_ONCE)  # acquire while a long sound is in memory: an hour takes 340 MB

    async def load(self, messages: list[Any], kwargs: dict[str, Any] | None) -> ChatMedia:
        """messages: JSON objects that contain media. Raises ApiError, which names the part that cannot be used.

        A picture of a few bytes may take hundreds of MB when it is decoded. So only the encoder's input is kept, and
        items that no longer fit into the context are not decoded.
        """
        rest, parts = self._split(messages)
        found = ChatMedia(rest, kwargs)
        size = 0
        most = self._llm.max_model_len

        def begin(part: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(self._prepare(part, kwargs))

        jobs = deque(map(begin, parts[:AT_ONCE]))
        try:
            for number, part in enumerate(parts):
                item = await jobs.popleft()
                jobs.extend(map(begin, parts[number + AT_ONCE :][:1]))
                size += item.num_embeds
                if size > most:
                    message = f"{part.where}: this item and those before it take {size} tokens; the context has {most}"
                    raise ApiError(400, message, param=part.where, code="context_length_exceeded")
                found.data.setdefault(part.modality, []).append(item)
                found.uuids.setdefault(part.modality, []).append(part.uuid)
        except ValueError as error:
            raise _refusal(error) from error
        except BusyError as error:
            raise _busy(error) from error
        finally:
            for job in jobs:
                if not job.cancel():
                    job.exception()  # otherwise asyncio logs that it was never retrieved
        return found

    def _split(self, messages: list[Any]) -> tuple[list[Any], list[MediaPart]]:
        """Return the messages with placeholders for their media, and the media."""
        try:
            if self._media is None:
                raise ValueError(f"{_first_part(messages)}: this model takes text only")
            rest, parts = self._media.split(messages)
            for modality in {part.modality for part in parts}:
                self._media.check_count(modality, sum(part.modality == modality for part in parts))
        except ValueError as error:
            raise _refusal(error) from error
        return rest, parts

    async def _prepare(self, part: Any, kwargs: dict[str, Any] | None) -> Any:
        """Fetch and preprocess an item in threads, and decode it in a job, which ends if the task is cancelled."""
        media = self._media
        assert media is not None
        async with self._turns:
            encoded, prepared = await self._in_thread(media.read, part, kwargs)
            if prepared is not None:
                return prepared
            if encoded is None:  # not a file but a decoded picture
                return await self._in_thread(media.prepare, part, kwargs)
            job = await self._job(encoded)
            return await self._in_thread(media.finish, part, encoded, job, kwargs)

    async def sound(self, data: bytes) -> Any:
        """Return the samples of an audio file. Raises ValueError, and ApiError if the server is overloaded."""
        media = self._media
        assert media is not None
        encoded = media.sound(data)
        try:
            return await self._in_thread(media.result, encoded, await self._job(encoded))
        except BusyError as error:
            raise _busy(error) from error

    @staticmethod
    async def _job(encoded: Any) -> Any:
        """Run the job that decodes an item, and return it when it has ended."""
        job = encoded.submit()
        with suppress(Exception):  # the job keeps the exception
            await asyncio.wrap_future(job)
        return job

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _first_part(messages: list[Any]) -> str:
    """Return the path of the first part that is not text."""
    return next(
        f"messages[{number}].content[{index}].{part['type']}"
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for index, part in enumerate(message["content"])
        if isinstance(part, dict) and part.get("type") in MEDIA_PARTS
    )


def _busy(error: BusyError) -> ApiError:
    message = f"decoding media was given up: {error_text(error)}; try again"
    return ApiError(503, message, code="server_overloaded", headers={"Retry-After": "1"})


def _refusal(error: ValueError) -> ApiError:
    text = error_text(error)
    path = text.partition(": ")[0]
    names = path.startswith("messages[") or path == "mm_processor_kwargs"
    return ApiError(400, text, param=path if names else "messages")
