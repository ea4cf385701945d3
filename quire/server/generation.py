"""A generation request, from admission to the last event."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fastapi import FastAPI, Request

from quire.config.engine import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.processor import ProcessedRequest, Prompt, PromptFields
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.messages.sampling_params import BeamSearchParams, SamplingParams
from quire.observability.logging import logger
from quire.server.adapters import Adapters
from quire.server.beams import BeamSearch
from quire.server.bodies import HeldBody, Preparing
from quire.server.errors import ApiError, bad_value
from quire.server.fill_in_middle import FillInMiddle
from quire.server.keep_alive import Residence
from quire.server.media import ChatMedia, MediaLoader
from quire.server.messages import Message, has_media, json_of
from quire.server.middleware import owner_of
from quire.server.protocol import MAX_SEQUENCES, Body, Generation, PromptBody, Rendering
from quire.server.rendering import render
from quire.server.request_log import RequestLog, Summary
from quire.server.tracing import RequestTrace
from quire.server.usage import Meter

SLICE = 64  # prompts of a request that are tokenized before other requests get a turn
MAX_STRINGS = 1024  # each in `stop` and `bad_words`
MAX_REPORTED = 1000  # unknown field names that are logged; further ones are not


@dataclass
class Server:
    """The state that all requests share: the engine, the options and the running calls.

    tool_parser: the name of the model's tool-call format, None if it is unknown.
    """

    llm: AsyncLLM
    config: ServerConfig
    model_names: list[str]
    tool_parser: str | None
    app: FastAPI
    adapters: Adapters
    log: RequestLog
    media: MediaLoader
    keep_alive: Residence
    preparing: Preparing  # requests that are not sent to the engine yet
    calls: set["PromptCall"] = field(default_factory=set)  # running calls
    takes_later_system_messages: bool | None = None  # whether the chat template does; None if unknown
    created: int = field(default_factory=lambda: int(time.time()))
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _is_ending: bool = False  # the drain timeout has passed

    @property
    def names(self) -> list[str]:
        """Return the names of the model and its adapters."""
        return [*self.model_names, *self.adapters.by_name]

    def accept(self, body: Body) -> str:
        """Return the name of the requested model. Raises ApiError for an unknown model and for unsupported fields."""
        if body.model and body.model not in (names := self.names):
            message = f"the model {body.model[:200]!r} does not exist; this server has {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if refused := body.unsupported():
            name, why = refused
            raise ApiError(400, f"{name} {why}", param=name, code="unsupported_parameter")
        for name in body.unknown():
            (body.model_extra or {}).pop(name, None)  # it may be large
            self._report("a field that is not known", name)
        for kind in body.hosted_tools():
            name = kind if kind.isidentifier() else "another"  # an unknown type may contain private text
            self._report("tools of a type that this server does not have", name)
        return body.model or self.model_names[0]

    def _report(self, what: str, name: str) -> None:
        """Log, once per name, that a part of a request was ignored."""
        if (what, name) not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add((what, name))
            logger.warning("Ignored %s: %.64r", what, name)

    def admit(self, is_new: bool = True) -> None:
        """Raises ApiError if no request may start now, and EngineDeadError if the engine has failed permanently.
        is_new: whether the request has just arrived; a draining server still runs older requests."""
        self.llm.client.check()
        if self._is_ending or (is_new and self.app.state.draining):
            message = "the server is shutting down"
            raise ApiError(503, message, code="shutting_down", headers={"Retry-After": "5"})
        limit = self.config.max_waiting_requests
        waiting = self._num_waiting()
        if limit is not None and waiting is not None and waiting >= limit:
            message = f"{waiting} requests are waiting; the server lets {limit} wait"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})

    def calls_of(self, owner: str, ids: Sequence[str]) -> list["PromptCall"]:
        """Return the running calls with any of these ids that carry the same API key."""
        wanted = set(ids)
        return [call for call in self.calls if call.owner == owner and not wanted.isdisjoint(call.names)]

    def count_running(self) -> int:
        return len(self.calls) + len(self.preparing)

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """The model's fill-in-the-middle format, or None if it has none."""
        return FillInMiddle.of(self.llm.get_tokenizer())

    def longest_output(self, max_tokens: int) -> int:
        """Return max_tokens, capped at the longest output that a request may ask for."""
        limits = self.llm.max_model_len, self.config.max_generated_tokens
        return min(max_tokens, *(limit for limit in limits if limit is not None))

    def end_calls(self) -> None:
        """End all running requests because the server shuts down. Each client gets an error, streams included."""
        error = ApiError(503, "the server is shutting down", code="shutting_down")
        self._is_ending = True
        self.preparing.fail(error)
        for call in list(self.calls):
            call.end(error)

    def _num_waiting(self) -> int | None:
        """Return the number of sequences that wait for a row, including those being sent to the core. None if a row is
        free."""
        client = self.llm.client
        running = client.stats.num_running
        queued = client.stats.num_waiting
        coming = max(0, client.num_unfinished - running - queued)
        free = 0 if queued else self.llm.config.scheduler.max_num_seqs * len(client.ready) - running
        return None if coming < free else queued + coming - free

    async def render(
        self, messages: Sequence[Message], body: Rendering, held: HeldBody, media: ChatMedia | None = None
    ) -> str:
        """Return the prompt of a conversation. media: the result of `load_media`; if None, the messages must not
        contain media. Raises ApiError."""
        may_bring_template = self.config.trust_request_chat_template or body.trusts_template
        return await render(self.llm.frontend, messages, body, held, media, may_bring_template)

    async def load_media(
        self, messages: Sequence[Message], kwargs: dict[str, Any] | None, held: HeldBody
    ) -> ChatMedia | None:
        """Load the media of a conversation. kwargs: of the preprocessing. Returns None if it has none. Raises
        ApiError."""
        if not has_media(messages):
            return None
        held.pause()  # media come from the body or from elsewhere; decoding may take long
        return await held.unless_left(self.media.load(json_of(messages), kwargs))


class PromptCall:
    """One request with prompts: its ids, and the reasons for which it may end early. Subclasses fill `_requests`."""

    def __init__(self, server: Server, request: Request, body: PromptBody, prefix: str) -> None:
        """Raises ApiError if the server does not accept the request."""
        self.server = server
        self.model = server.accept(body)
        self._adapter = server.adapters.get(self.model)
        server.admit()
        state = request.state
        self.name: str = state.request_id if state.request_id_given or not body.request_id else body.request_id
        self.id, self.created = f"{prefix}-{self.name}", int(time.time())
        self.owner = owner_of(request.scope)
        self.summary = state.summary = Summary(self.id, self.model, self.model != server.model_names[0])
        self._engine_id = f"{self.id}-{secrets.token_hex(4)}"  # clients may reuse an id
        self._began = asyncio.get_running_loop().time()
        self._log_id = state.request_id
        self._came_at = state.began
        self.trace: RequestTrace | None = getattr(state, "trace", None)
        self._receive = request.receive
        self._held: HeldBody = request.state.body
        self._requests: list[ProcessedRequest] = []
        self._ended_by: ApiError | None = None
        self._constraint_field: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The ids by which the client can abort the request."""
        return self.id, self.name

    @property
    def keep_alive_interval(self) -> float:
        return self.server.config.sse_keep_alive_interval

    def _request_id(self, index: int, num_prompts: int) -> str:
        return self._engine_id if num_prompts == 1 else f"{self._engine_id}-{index}"

    async def run(self) -> AsyncGenerator[RequestOutput]:
        """Yield outputs like AsyncLLM.run. The request ends when its client disconnects or its timeout passes.

        Raises ApiError, EngineDeadError.
        """
        server = self.server
        timeout = self.server.config.request_timeout
        server.admit(is_new=False)  # again, since other requests may have arrived during tokenization
        server.log.received(self._log_id, self._requests)
        loop = asyncio.get_running_loop()
        watcher = asyncio.create_task(self._watch())
        timer = None if timeout is None else loop.call_at(self._began + timeout, self._time_out)
        server.calls.add(self)
        whole: list[RequestOutput] = []
        try:
            await server.keep_alive.begin()
            if self._ended_by is not None:  # while the engine woke up
                raise self._ended_by
            async with aclosing(self._outputs(whole)) as outputs:
                async for output in outputs:
                    for completion in output.outputs:
                        self._check(completion)
                    yield output
        finally:
            server.calls.discard(self)
            server.keep_alive.end()
            self.summary.count(whole, self._came_at)
            if self.trace is not None:
                self.trace.ran(self._requests, whole, self._came_at)
            watcher.cancel()
            if timer is not None:
                timer.cancel()

    def _outputs(self, whole: list[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        """As AsyncLLM.run."""
        return self.server.llm.run(self._requests, whole=whole)

    def end(self, error: ApiError) -> None:
        """Abort the request. Its client receives the error instead of the generated text."""
        self._ended_by = error
        self.abort()

    def abort(self) -> None:
        for request in self._requests:
            self.server.llm.abort(request.request_id)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ApiError(499, "the client closed the connection"))

    def _time_out(self) -> None:
        message = f"the request was not finished within {self.server.config.request_timeout} s"
        self.end(ApiError(504, message, code="timeout"))

    def _check(self, completion: CompletionOutput) -> None:
        """Raises ApiError if the completion has failed."""
        if completion.finish_reason == "error":
            self.server.llm.client.check()
            reason = f"the request failed: {completion.stop_reason}"
            quotes = self._constraint_field is not None
            raise ApiError(500, reason, code="request_failed", quotes=quotes)
        if completion.finish_reason == "overloaded":
            raise ApiError(503, str(completion.stop_reason), code="server_overloaded", headers={"Retry-After": "1"})
        if completion.finish_reason == "abort" and self._ended_by is not None:
            raise self._ended_by


class Call(PromptCall):
    """A request for generated text."""

    def __init__(self, server: Server, request: Request, body: Generation, prefix: str) -> None:
        """Raises ApiError if the server does not accept the request."""
        super().__init__(server, request, body, prefix)
        if not server.llm.processor.generates:
            raise ApiError(400, "this model makes embeddings or scores, and generates no text", param="model")
        self.body = body
        self._beams: BeamSearch | None = None  # only if the request asks for it

    def _outputs(self, whole: list[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        return super()._outputs(whole) if self._beams is None else self._search(self._beams, whole)

    async def _search(self, beams: BeamSearch, whole: list[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        async with aclosing(beams.run()) as outputs:
            async for output in outputs:
                whole.append(output)
                yield output

    def abort(self) -> None:
        super().abort()
        for request in () if self._beams is None else self._beams.running:
            self.server.llm.abort(request.request_id)

    @property
    def tokens_as_ids(self) -> bool:
        """Whether logprobs name tokens by their ids."""
        asked = self.body.return_tokens_as_token_ids
        return self.server.config.return_tokens_as_token_ids if asked is None else asked

    def meter(self) -> Meter:
        option = self.server.llm.config.scheduler.per_request_spec_decode_metrics
        return Meter(bool(self.body.return_spec_decode_metrics) or option != "none")

    async def process(
        self,
        prompts: Sequence[Prompt],
        default_max_tokens: int | None,
        add_special_tokens: bool,
        name: str,
        constraint_field: str | None = None,
        **changes: Any,
    ) -> list[ProcessedRequest]:
        """Tokenize the prompts and set the sampling parameters. Releases the body. Raises ApiError.

        name: the field that the prompts come from. constraint_field: the field that the structured outputs come from.
        changes: fields of SamplingParams that replace the body's.
        """
        body = self.body
        processor = self.server.llm.processor
        held = self._held
        self._constraint_field = constraint_field or body.constraint_field
        given = {**body.given(), **changes}
        asked = given.get("max_tokens")
        if body.use_beam_search:
            given["n"] = 1
        given["max_tokens"] = self._max_tokens(given.get("max_tokens"), default_max_tokens, len(prompts))
        self._check_sizes()
        self._check_length(0, asked)
        try:
            params = await held.run(partial(processor.default_sampling_params, name == "messages", **given))
            for prompt in prompts:
                processor.check_length(prompt, params)
            for start in range(0, len(prompts), SLICE):
                if start:
                    await asyncio.sleep(0)  # let other requests run
                slice = {self._request_id(i, len(prompts)): prompts[i] for i in range(len(prompts))[start:][:SLICE]}
                run = asyncio.to_thread if any(isinstance(prompt, dict) for prompt in slice.values()) else held.run
                requests = await run(self._process, slice, params, add_special_tokens)
                for request in requests:
                    self._check_length(len(request.prompt_token_ids), asked)
                self._requests += requests
            if body.use_beam_search:
                self._beams = self._beam_search(params)
        except (ValueError, TypeError, OverflowError) as error:
            refusal = bad_value(error, type(body).model_fields, name)
            if refusal.param == "structured_outputs":
                refusal.param = self._constraint_field
            elif refusal.param == "logprobs" and name == "messages":
                refusal.param = "top_logprobs"  # in chats, logprobs is a boolean
            raise refusal from error
        body.drop_prompt()
        held.release()
        return self._requests

    def _beam_search(self, params: SamplingParams) -> BeamSearch:
        """Raises ValueError."""
        body = self.body
        llm = self.server.llm
        search = BeamSearchParams(
            beam_width=body.n or 1,
            max_tokens=params.max_tokens or llm.max_model_len,
            ignore_eos=params.ignore_eos,
            temperature=body.temperature or 0.0,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        )
        return BeamSearch(llm, self._requests, search, params.skip_special_tokens)

    def _process(
        self, prompts: Mapping[str, Prompt], params: SamplingParams, add_special_tokens: bool
    ) -> list[ProcessedRequest]:
        """prompts: prompts by request id."""
        body = self.body
        requests = []
        for request_id, prompt in prompts.items():
            fields: PromptFields = {}
            if isinstance(prompt, dict):
                fields = prompt
            elif isinstance(prompt, str):
                fields = {"prompt": prompt}
            else:
                fields = {"prompt_token_ids": prompt}
            if body.cache_salt is not None:
                fields["cache_salt"] = body.cache_salt
            process = self.server.llm.processor.process
            request = process(request_id, fields, params, body.priority or 0, add_special_tokens, self._adapter)
            if params.truncate_prompt_tokens is not None and not getattr(body, "return_prompt_text", None):
                request = replace(request, prompt=None)  # the text may be much longer than the tokens
            requests.append(request)
        return requests

    def _check_sizes(self) -> None:
        """Raises ApiError for lists that are long enough to slow down every token."""
        vocab_size = self.server.llm.processor.vocab_size
        for name, most in (
            ("stop", MAX_STRINGS),
            ("bad_words", MAX_STRINGS),
            ("logit_bias", vocab_size),
            ("allowed_token_ids", vocab_size),
            ("stop_token_ids", vocab_size),
        ):
            value = getattr(self.body, name)
            if value is not None and not isinstance(value, str) and len(value) > most:
                raise ApiError(400, f"{name} has {len(value)} entries; at most {most} are allowed", param=name)

    def _max_tokens(self, given: int | None, default: int | None, num_prompts: int) -> int | None:
        """Return the limit of output tokens. Raises ApiError for more sequences or tokens than a request may ask
        for."""
        count = self.body.num_generated
        num_sequences = num_prompts * count
        if num_sequences > MAX_SEQUENCES:
            message = f"{num_prompts} prompts of n={count} completions: at most {MAX_SEQUENCES} are allowed"
            raise ApiError(400, message, param="n")
        limit = self.server.config.max_generated_tokens
        if limit is None:
            return default if given is None else max(given, 1)
        share = limit // num_sequences
        if share < 1 or (given or 0) > share:
            message = f"prompts x n x max_tokens may be {limit} at most"
            raise ApiError(400, message, param="max_tokens" if share else "n")
        return min(share, share if default is None else default) if given is None else max(given, 1)

    def _check_length(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises ApiError if the client asks for more tokens than the context has, or with --strict-max-tokens, for
        more than fit after the prompt."""
        limit = self.server.llm.max_model_len
        max_tokens = max_tokens or 0
        field = self.body.max_tokens_field
        code = "context_length_exceeded"
        if self.server.config.strict_max_tokens and num_prompt_tokens + max_tokens > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output "
                f"tokens and your prompt contains {num_prompt_tokens} input tokens, for a total of "
                f"{num_prompt_tokens + max_tokens} tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens."
            )
            raise ApiError(400, message, param=field, code=code)
        if max_tokens > limit:
            message = f"{field} is {max_tokens}, but this model's maximum context length is {limit} tokens"
            raise ApiError(400, message, param=field, code=code)

    def _check(self, completion: CompletionOutput) -> None:
        super()._check(completion)
        if completion.finish_reason == "bad_request" and str(completion.stop_reason).startswith("adapter "):
            raise ApiError(400, str(completion.stop_reason), param="model", code="adapter_unusable")
        if completion.finish_reason == "bad_request":
            reason = str(completion.stop_reason).removeprefix("structured_outputs: ")
            field = self._constraint_field
            raise ApiError(400, f"{field}: {reason}", param=field, quotes=True)

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that a response and all its chunks share."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def answer(self, kind: str, choices: list[Any], meter: Meter, **extra: Any) -> dict[str, Any]:
        """Return the complete response of a request without streaming. Fields of vLLM that Quire does not support are
        null."""
        return {
            **self.head(kind),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"completion_tokens_details": None, **meter.usage},
            **extra,
            "kv_transfer_params": self._requests[0].kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": meter.metrics,
        }
