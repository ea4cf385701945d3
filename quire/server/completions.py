"""POST /v1/completions"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.engine.processor import ProcessedRequest, Prompt
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.server.errors import ApiError, json_response
from quire.server.fill_in_middle import FillInMiddle
from quire.server.generation import Call
from quire.server.logprobs import completion_logprobs, prompt_logprobs
from quire.server.protocol import CompletionRequest
from quire.server.responses import CompletionChoice, CompletionLogprobs, CompletionResponse
from quire.server.routing import StrictRoute, stream_answers
from quire.server.streams import EventStream
from quire.server.usage import Chunks

router = APIRouter(route_class=StrictRoute)
DEFAULT_MAX_TOKENS = 16
_NULLS: Any = {"prompt_logprobs": None, "routed_experts": None, "weight_versions": None}  # if not streamed


@router.post("/v1/completions", responses=stream_answers(CompletionResponse), response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    call = Call(request.app.state.server, request, body, "cmpl")
    special = body.add_special_tokens is not False
    prompts = body.prompts
    changes: dict[str, Any] = {}
    if body.suffix:
        fill = call.server.fill_in_middle
        if fill is None:
            message = "suffix: the tokenizer of this model has no tokens for prompts with a gap"
            raise ApiError(400, message, param="suffix")
        changes = {} if body.ignore_eos else {"stop_token_ids": [*(body.stop_token_ids or ()), *fill.ends]}
        prompts = await request.state.body.run(_with_gap, fill, prompts, body.suffix, special)
    requests = await call.process(prompts, DEFAULT_MAX_TOKENS, special, "prompt", **changes)
    builder = _Choices(call, body, requests)
    if body.stream:
        return await EventStream.begin(builder.stream(), call.keep_alive_interval)
    return json_response(await builder.collect())


def _with_gap(fill: FillInMiddle, prompts: Sequence[Any], suffix: str, special: bool) -> list[Prompt]:
    return [fill.prompt(prompt, suffix, special) for prompt in prompts]


def _likeliest(output: RequestOutput, count: int) -> None:
    """Keep the `count` completions with the highest average token probability, best first."""

    def likelihood(completion: CompletionOutput) -> float:
        return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)

    output.outputs = sorted(output.outputs, key=likelihood, reverse=True)[:count]
    for index, completion in enumerate(output.outputs):
        completion.index = index


class _Choices:
    """Turns outputs into choices. Choice i of prompt p has index p * n + i."""

    def __init__(self, call: Call, body: CompletionRequest, requests: list[ProcessedRequest]) -> None:
        self.call = call
        self.body = body
        self.n = body.n or 1
        self.tokenizer = call.server.llm.get_tokenizer()
        self.requests = {request.request_id: (place, request) for place, request in enumerate(requests)}
        self.meter = call.meter()
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters of the tokens reported so far, by index

    async def collect(self) -> dict[str, Any]:
        choices: list[CompletionChoice] = []
        async with aclosing(self.call.run()) as outputs:
            async for output in outputs:
                self._cut(output)
                self.meter.add(output)
                if self.body.num_generated > self.n:
                    _likeliest(output, self.n)
                choices += [{**_NULLS, **self._choice(output, completion, True)} for completion in output.outputs]
        choices.sort(key=lambda choice: choice["index"])
        return self.call.answer("text_completion", choices, self.meter)

    async def stream(self) -> AsyncGenerator[bytes]:
        chunks = Chunks(self.call, self.call.head("text_completion"))
        begun = set()
        async with aclosing(self.call.run()) as outputs:
            async for output in outputs:
                self._cut(output)
                self.meter.add(output)
                events = []
                for completion in output.outputs:
                    key = output.request_id, completion.index
                    choice = self._choice(output, completion, key not in begun)
                    if key not in begun or completion.token_ids or completion.finish_reason:
                        events.append(chunks.event(choice, self.meter))
                    begun.add(key)
                if events:
                    yield b"".join(events)
        if last := chunks.last(self.meter):
            yield last

    def _cut(self, output: RequestOutput) -> None:
        """Drop the generated token if max_tokens is 0, since the engine always generates at least one."""
        if self.body.max_tokens == 0:
            for completion in output.outputs:
                completion.text = ""
                completion.token_ids = []
                completion.logprobs = None if completion.logprobs is None else []
                completion.stop_reason = None
                completion.finish_reason = completion.finish_reason and "length"

    def _choice(self, output: RequestOutput, completion: CompletionOutput, first: bool) -> CompletionChoice:
        place, request = self.requests[output.request_id]
        index = place * self.n + completion.index
        echo = first and bool(self.body.echo)
        with_ids = self.body.return_token_ids
        choice = CompletionChoice(
            index=index,
            text=self._prompt_text(request) + completion.text if echo else completion.text,
            logprobs=self._logprobs(output, completion, index, echo),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if with_ids else None,
            prompt_token_ids=output.prompt_token_ids if with_ids and first else None,
        )
        if first and self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _prompt_text(self, request: ProcessedRequest) -> str:
        whole = request.prompt is not None and request.params.truncate_prompt_tokens is None
        return request.prompt or "" if whole else self.tokenizer.decode(request.prompt_token_ids, False)

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput, index: int, echo: bool
    ) -> CompletionLogprobs | None:
        if self.body.logprobs is None or completion.logprobs is None:
            return None
        count = None if self.body.logprob_token_ids else self.body.logprobs
        token_ids: list[int] = completion.token_ids
        places: list[Any] = completion.logprobs
        if echo:
            of_prompt = output.prompt_logprobs or []  # incomplete for an aborted request
            token_ids = output.prompt_token_ids[: len(of_prompt)] + token_ids
            places = of_prompt + places
        as_ids = self.call.tokens_as_ids
        logprobs = completion_logprobs(token_ids, places, count, as_ids, self._offsets[index], self.tokenizer)
        if logprobs["tokens"]:
            self._offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return logprobs
