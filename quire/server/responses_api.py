"""/v1/responses: create, stream, retrieve, cancel and delete responses, and list their input."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import Response
from starlette.types import Message

from quire.config.engine import ServerConfig
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.server.bodies import HeldBody
from quire.server.errors import ApiError, api_error, json_response
from quire.server.fields import TABLES
from quire.server.generation import Server
from quire.server.middleware import owner_of
from quire.server.response_items import Item, ResponsesRequest, in_terms_of_responses
from quire.server.response_output import Events, Output
from quire.server.response_store import MissingResponseError, Record, StoreError, is_made, key_of, new_id, open_store
from quire.server.response_tools import echoed
from quire.server.responses import Usage
from quire.server.routing import StrictRoute, answers, stream_answers
from quire.server.running_chat import Piece, RunningChat
from quire.server.streams import EventStream

REFRESH_SECONDS = 2.0  # between heartbeats of a server for its background responses
LOST_SECONDS = 60.0  # without a heartbeat, after which the response has failed

T = TypeVar("T")
_FIELDS = TABLES["responses"]
router = APIRouter(route_class=StrictRoute)  # needs a model
stored = APIRouter(route_class=StrictRoute)  # needs the store only


class ResponseStream(EventStream):
    done = b""


class Responses:
    """The stored responses, and the responses that this server generates in the background."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError."""
        self.store = open_store(config)
        self.keep_alive_interval = config.sse_keep_alive_interval
        self.runs: dict[str, Run] = {}  # by key in the store

    async def call(self, method: Callable[..., T], owner: str, response_id: str, param: str = "response_id") -> T:
        """Call a method of the store. Raises ApiError."""
        try:
            if re.fullmatch(r"[!-~]{1,128}", response_id):
                return await self.store.run(method, owner, response_id)
        except MissingResponseError:
            pass
        except StoreError as error:
            raise _unavailable(error) from error
        raise ApiError(404, f"no response has the id {response_id[:100]!r}", param=param, code="response_not_found")

    def run_of(self, owner: str, response_id: str) -> "Run | None":
        """Return the run if this server is generating the response in the background, otherwise None."""
        run = self.runs.get(key_of(owner, response_id))
        return run if run is not None and run.owner == owner else None

    def check_id(self, owner: str, chosen: str | None) -> None:
        """Raises ApiError if a client may not choose this id for a response."""
        if chosen is not None and is_made(chosen):
            raise ApiError(400, "request_id: only the server makes ids of this form", param="request_id")
        if chosen is not None and self.run_of(owner, chosen) is not None:
            raise ApiError(400, f"request_id: the response {chosen} is being generated", param="request_id")

    async def find(self, owner: str, response_id: str) -> Record:
        if (run := self.run_of(owner, response_id)) is not None:
            return run.record
        record = await self.call(self.store.get, owner, response_id)
        if record.is_running and abs(time.time() - record.used) > LOST_SECONDS:
            used = record.used
            await asyncio.sleep(2 * REFRESH_SECONDS)  # the clock may have jumped: wait for a heartbeat
            record = await self.call(self.store.get, owner, response_id)
            if not record.is_running or record.used != used:
                return record
            error = {"code": "server_error", "message": "the server that generated the response has ended"}
            record.response |= {"status": "failed", "error": error}
        return record

    async def conversation(self, owner: str, response_id: str, held: HeldBody) -> list[Item]:
        """Return the items up to and including the response's output, and count them as part of the body. Raises
        ApiError."""
        param = "previous_response_id"
        held.pause()  # the store may be slow
        records = await self.call(self.store.chain, owner, response_id, param)
        if records[-1].is_running:
            raise ApiError(400, f"{param}: the response {response_id} is not complete", param=param)
        if missing := records[0].response["previous_response_id"]:
            message = f"{param}: the conversation's response {missing} is not stored any more"
            raise ApiError(404, message, param=param, code="response_not_found")
        held.grow(sum(record.size for record in records))
        return [item for record in records for item in record.items]


def _unavailable(error: StoreError) -> ApiError:
    logger.error("The store of responses failed: %s", error)
    return ApiError(503, "the store of responses is not available; try again", code="store_unavailable")


def _responses(request: Request) -> Responses:
    responses: Responses = request.app.state.responses
    return responses


class Run:
    """A response that is being generated.

    record: the stored record. events: the pending events of its stream, or all events if it runs in the background.
    """

    def __init__(
        self, responses: Responses, running_chat: RunningChat, record: Record, owner: str, body: ResponsesRequest
    ) -> None:
        self.responses = responses
        self.running_chat = running_chat
        self.record = record
        self.owner = owner
        self.is_background = bool(record.response["background"])
        self.is_cancelled = False
        self.task: asyncio.Task[None] | None = None
        self.log: Callable[[], None] = lambda: None  # called when a background response has ended
        self.events = Events()
        encrypts = "reasoning.encrypted_content" in (body.include or ())
        self._output = Output(self.events, body.named_tools, encrypts)
        self._news = asyncio.Condition()
        self._key = key_of(owner, record.response["id"])

    @property
    def response(self) -> dict[str, Any]:
        return self.record.response

    async def steps(self) -> AsyncGenerator[None]:
        """Generate, and yield whenever there are new events. An error before the first output is raised: ApiError,
        EngineDeadError. A later error, or one in the background, ends the response."""
        begun = self.is_background
        try:
            async with aclosing(self.running_chat.pieces()) as steps:
                async for pieces in steps:
                    if self.is_cancelled:
                        self.running_chat.call.abort()
                    if not begun:
                        self.events.make("response.created", response=self.response)
                    if not begun or self.response["status"] == "queued":
                        self.response["status"] = "in_progress"
                        self.events.make("response.in_progress", response=self.response)
                    begun = True
                    for piece in pieces:
                        self._add(piece)
                    yield
            await self._end(None)
        except Exception as error:
            if not begun:
                raise
            await self._end(api_error(error))
        yield

    async def stream(self) -> AsyncGenerator[bytes]:
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                if self.events:
                    yield self.events.take()

    async def start(self) -> None:
        """Generate in the background. Raises ApiError if the response cannot be stored."""
        try:
            await self.responses.store.run(self.responses.store.put, self.owner, self.record)
        except StoreError as error:
            raise _unavailable(error) from error
        for kind in ("response.created", "response.queued"):
            self.events.make(kind, response=self.response)
        self.responses.runs[self._key] = self
        self.task = asyncio.create_task(self._generate())
        await asyncio.sleep(0)  # let it start before the client gets a response: a draining server admits nothing

    async def _generate(self) -> None:
        refreshing = asyncio.create_task(self._refresh())
        try:
            async for _ in self.steps():
                async with self._news:
                    self._news.notify_all()
        finally:
            refreshing.cancel()
            del self.responses.runs[self._key]
            self.log()
            async with self._news:
                self.task = None
                self._news.notify_all()

    async def _refresh(self) -> None:
        """Signal to other servers that the response is being generated, and stop if one of them cancelled it."""
        store = self.responses.store
        while not self.is_cancelled:
            await asyncio.sleep(REFRESH_SECONDS)
            with suppress(StoreError):
                # A copy, since the response may change before it is written.
                if not await store.run(store.replace, self.owner, Record(dict(self.response), self.record.input)):
                    self.cancel()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.running_chat.call.abort()

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events of a background response after event number `after`, until the last one."""
        position = after + 1
        while True:
            async with self._news:
                while self.task is not None and len(self.events) <= position:
                    await self._news.wait()
                is_last = self.task is None
                news = self.events[position:]
            position += len(news)
            yield b"".join(news)
            if is_last:
                return

    def _add(self, piece: Piece) -> None:
        scored = self.running_chat.logprobs(piece.completion)
        logprobs: list[Any] = [] if scored is None else list(scored["content"])
        for event in piece.events:
            self._output.add(event, piece.answer, logprobs)
            logprobs = []

    async def _end(self, error: ApiError | None) -> None:
        [answer] = self.running_chat.answers
        response = self.response
        reason = answer.finish_reason
        status = "completed"
        if error is not None:
            code = "server_error" if error.status_code >= 500 else "invalid_prompt"
            status, response["error"] = "failed", {"code": code, "message": error.detail}
            self.running_chat.call.summary.error = error
        elif self.is_cancelled or reason == "abort":
            status = "cancelled"
        elif reason == "length":
            status, response["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._output.close("completed" if status == "completed" else "incomplete")
        response |= {"status": status, "output": self._output.items, "usage": _usage(self.running_chat.meter.usage)}
        if response["store"] and (error is None or error.status_code != 499):
            await self._store()
        self.events.make(_last_event(status), response=response)

    async def _store(self) -> None:
        """Store the response. If the store fails, the client still gets the response, marked as not stored."""
        store = self.responses.store
        try:
            if not self.is_background:
                await store.run(store.put, self.owner, self.record)
            elif not await store.run(store.replace, self.owner, self.record):
                self.response["status"] = "cancelled"
        except StoreError as error:
            self.response["store"] = False
            logger.error("Request %s: its response was not stored: %s", self.running_chat.call.name, error_text(error))


def _usage(usage: Usage) -> dict[str, Any]:
    """Convert a chat's usage to the field names of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details") or {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _last_event(status: str) -> str:
    return f"response.{'incomplete' if status == 'cancelled' else status}"


def _replay(record: Record, after: int) -> list[bytes]:
    """Return the events of a stored response, with each text in one delta. The last event is always included."""
    events = Events()
    begun = {**record.response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    events.make("response.created", response=begun)
    events.make("response.in_progress", response=begun)
    output = Output(events)
    for item in record.response["output"]:
        output.replay(item)
    events.make(_last_event(record.response["status"]), response=record.response)
    return events[after + 1 :] or events[-1:]


def _new_response(server: Server, body: ResponsesRequest, running_chat: RunningChat) -> dict[str, Any]:
    """Return a response without output, with its parameters as given or by default."""
    sampling = server.llm.processor.default_sampling_params(chat=True)
    default = {
        **dict.fromkeys(_FIELDS["default_null"].split()),
        **_FIELDS["default"],
        "reasoning": {"effort": None, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    status = "queued" if body.background else "in_progress"
    return {
        "id": body.request_id or new_id("resp"),
        "object": "response",
        "created_at": running_chat.call.created,
        "status": status,
        "model": running_chat.call.model,
        "output": [],
        **default,
        **body.model_dump(include=set(default), by_alias=True, exclude_none=True),
        "tools": [echoed(tool) for tool in body.tools or ()],
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
    }


@router.post("/v1/responses", responses=stream_answers(Item), response_model=None)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Respond to the input, which may continue an earlier response."""
    request.app.state.server.accept(body)
    try:
        return await _answer(body, request)
    except ApiError as error:
        raise in_terms_of_responses(error) from error


async def _answer(body: ResponsesRequest, request: Request) -> Response:
    responses = _responses(request)
    owner = owner_of(request.scope)
    earlier = []
    if body.previous_response_id is not None:
        earlier = await responses.conversation(owner, body.previous_response_id, request.state.body)
    responses.check_id(owner, body.request_id)
    items = body.items()
    chat = await request.state.body.run(body.chat, [*earlier, *items])
    body.drop_prompt()
    running_chat = await RunningChat.begin(Request(request.scope, _never) if body.background else request, chat, "resp")
    response = _new_response(request.app.state.server, body, running_chat)
    running_chat.call.id = running_chat.call.summary.response_id = response["id"]
    run = Run(responses, running_chat, Record(response, items if response["store"] else []), owner, body)
    if body.background:
        run.log = request.app.state.server.log.later(request.scope)
        await run.start()
        if not body.stream:
            return json_response(response)
        return await ResponseStream.begin(run.follow(-1), responses.keep_alive_interval)
    if body.stream:
        return await ResponseStream.begin(run.stream(), responses.keep_alive_interval)
    async for _ in run.steps():
        pass
    return json_response(run.response)


async def _never() -> Message:
    """Wait forever: a background response does not end when its client closes the connection."""
    await asyncio.Event().wait()
    raise AssertionError


@stored.get("/v1/responses/{response_id}", responses=stream_answers(Item), response_model=None)
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, description="The number of the last event that is known.")] = -1,
) -> Response:
    """Return a stored response or one that is being generated in the background; with stream, its events."""
    responses = _responses(request)
    record = await responses.find(owner_of(request.scope), response_id)
    if not stream:
        return json_response(record.response)
    run = responses.run_of(owner_of(request.scope), response_id)
    if run is not None:
        return await ResponseStream.begin(run.follow(starting_after), responses.keep_alive_interval)
    if record.is_running:
        raise ApiError(400, "stream: another server generates the response; its stream is there", param="stream")
    return await ResponseStream.begin(_events(_replay(record, starting_after)), responses.keep_alive_interval)


async def _events(events: list[bytes]) -> AsyncGenerator[bytes]:
    yield b"".join(events)


@stored.post("/v1/responses/compact", include_in_schema=False)
async def compact() -> None:
    """Reject OpenAI's compaction of a conversation, which clients probe for. Raises ApiError."""
    message = "conversations cannot be compacted; truncation=auto in /v1/responses drops the beginning of a long input"
    raise ApiError(404, message, code="not_found")


@stored.post("/v1/responses/{response_id}/cancel", responses=answers(Item), response_model=None)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response that is generated in the background."""
    responses = _responses(request)
    owner = owner_of(request.scope)
    record = await responses.find(owner, response_id)
    if not record.response["background"]:
        raise ApiError(
            400, "a response that is not generated in the background cannot be cancelled", param="response_id"
        )
    run = responses.run_of(owner, response_id)
    if run is not None and run.task is not None:
        run.cancel()
        await asyncio.wait([run.task])
    elif record.is_running:
        record.response["status"] = "cancelled"
        await responses.call(lambda owner, _: responses.store.replace(owner, record), owner, response_id)
    elif record.response["status"] != "cancelled":
        raise ApiError(400, f"the response is {record.response['status']} already", param="response_id")
    return json_response(record.response)


@stored.delete("/v1/responses/{response_id}", responses=answers(Item), response_model=None)
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response. Responses that continue it can still be read, but not continued."""
    responses = _responses(request)
    owner = owner_of(request.scope)
    await responses.call(responses.store.delete, owner, response_id)
    run = responses.run_of(owner, response_id)
    if run is not None:
        run.cancel()
    return json_response({"id": response_id, "object": "response", "deleted": True})


@stored.get("/v1/responses/{response_id}/input_items", responses=answers(Item), response_model=None)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Return the conversation that the model received: the input of all continued responses, then of this one."""
    responses = _responses(request)
    *earlier, last = await responses.call(responses.store.chain, owner_of(request.scope), response_id)
    items = [item for record in earlier for item in record.items] + last.input
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        begin = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0)
        if not begin:
            raise ApiError(400, f"after: the response has no input item {after[:100]!r}", param="after")
    data = items[begin : begin + limit]
    listed = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > begin + limit,
    }
    return json_response(listed)
