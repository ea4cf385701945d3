"""POST /inference/v1/generate: vLLM's endpoint for clients that tokenize and detokenize themselves."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.server.errors import ApiError, json_response
from quire.server.fields import MAX_INT, TABLES, ExtraArguments, Logprobs, Positive, StreamOptions, TokenIds
from quire.server.generation import Call
from quire.server.logprobs import chat_logprobs, prompt_logprobs, token_id_logprobs
from quire.server.protocol import UNSUPPORTED, Body, Generation
from quire.server.routing import StrictRoute, stream_answers
from quire.server.streams import EventStream
from quire.server.usage import Chunks

router = APIRouter(route_class=StrictRoute)


class TokenSampling(Generation):
    """The fields of vLLM's SamplingParams. The request's own fields have no effect in this object."""

    max_tokens: Positive | None = Field(None, description="Default: what the model's context has room for.")
    logprobs: Logprobs | None = Field(None, description="Logprobs of so many of the likeliest tokens at each place.")
    detokenize: bool | None = Field(None, description="Ignored: output_mode and stop decide it.")
    skip_reading_prefix_cache: bool | None = Field(None, description="Compute the whole prompt.")
    extra_args: ExtraArguments | None = Field(None, description="Arguments for plugins that process logits.")

    @property
    def constraint_field(self) -> str | None:
        field = super().constraint_field
        return None if field is None else f"sampling_params.{field}"

    def unsupported(self) -> tuple[str, str] | None:
        if self.use_beam_search:
            return "use_beam_search", "is not supported here; /v1/completions takes it"
        return self.refused(UNSUPPORTED | TABLES["generate"]["refused"])


class GenerateRequest(Body):
    token_ids: TokenIds = Field(min_length=1, description="The prompt.")
    sampling_params: TokenSampling
    output_mode: Literal["tokens", "text"] = Field("tokens", description="text: return the text of the tokens, too.")
    stream: bool | None = Field(None, description="Send server-sent events as tokens come.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    return_token_ids: bool | None = Field(None, description="Of the prompt.")
    return_spec_decode_metrics: bool | None = Field(None, description="What became of drafts, if there were any.")
    cache_salt: str | None = Field(None, min_length=1, description="Share cached prefixes with the same salt only.")
    priority: int | None = Field(None, ge=-MAX_INT, le=MAX_INT, description="The lowest comes first.")
    kv_transfer_params: dict[str, Any] | None = Field(None, description="See docs/disaggregation.md.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="Unless X-Request-Id says another.")

    def sampling(self) -> TokenSampling:
        """Return sampling_params merged with the request's other fields, as `Call` reads them."""
        inner = self.sampling_params
        fields = {name: getattr(self, name) for name in type(self).model_fields if name in Generation.model_fields}
        detokenize = self.output_mode == "text" or bool(inner.stop)
        extra = {"detokenize": detokenize, "vllm_xargs": inner.extra_args or inner.vllm_xargs}
        sampling = inner.model_copy(update={**fields, **extra})
        if self.model_extra:
            # Not by model_copy: here a sampling field outside sampling_params counts as unknown, so its value was not
            # validated.
            sampling.__pydantic_extra__ = {**(sampling.model_extra or {}), **self.model_extra}
        return sampling


# Keys of unsupported features, in a complete response and in its choices.
_NULLS = dict.fromkeys("prompt_token_id_logprobs mm_placeholders ec_transfer_params".split())
_CHOICE_NULLS = dict.fromkeys("routed_experts sampling_mask weight_versions".split())


@router.post("/inference/v1/generate", responses=stream_answers(dict[str, Any]), response_model=None)
async def generate(body: GenerateRequest, request: Request) -> Response:
    try:
        call = Call(request.app.state.server, request, body.sampling(), "generate-tokens")
        default = call.server.llm.processor.generation_config.get("max_new_tokens")
        await call.process([body.token_ids], default, False, "token_ids")
    except ApiError as error:
        own = {*GenerateRequest.model_fields, *((body.model_extra or {}).keys() - TokenSampling.model_fields.keys())}
        if error.param is not None and error.param.partition(".")[0] not in own:
            error.param = f"sampling_params.{error.param}"
        raise
    body.token_ids = []
    if body.stream:
        return await EventStream.begin(_stream(call, body), call.keep_alive_interval)
    async with aclosing(call.run()) as outputs:
        output = await anext(outputs)
    meter = call.meter()
    meter.add(output)
    answer = {
        "request_id": call.id,
        "model": call.model,
        "created": call.created,
        "output_mode": body.output_mode,
        "choices": [{**_choice(call, body, completion), **_CHOICE_NULLS} for completion in output.outputs],
        "usage": {"completion_tokens_details": None, **meter.usage},
        "metrics": meter.metrics,
        "kv_transfer_params": output.kv_transfer_params,
        **_prompt_keys(body, output),
        **_NULLS,
    }
    return json_response(answer)


async def _stream(call: Call, body: GenerateRequest) -> AsyncGenerator[bytes]:
    head = {"request_id": call.id, "output_mode": body.output_mode}
    chunks = Chunks(call, head)
    meter = call.meter()
    extra = None
    async with aclosing(call.run()) as outputs:
        async for output in outputs:
            meter.add(output)
            extra = _prompt_keys(body, output) if extra is None else extra
            events = []
            for completion in output.outputs:
                if completion.token_ids or completion.finish_reason:
                    events.append(chunks.event(_choice(call, body, completion), meter, **extra))
                    extra = {}
            if events:
                yield b"".join(events)
    if last := chunks.last(meter):
        yield last


def _prompt_keys(body: GenerateRequest, output: RequestOutput) -> dict[str, Any]:
    places = output.prompt_logprobs
    return {
        "prompt_logprobs": None if places is None else prompt_logprobs(places),
        "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
    }


def _choice(call: Call, body: GenerateRequest, completion: CompletionOutput) -> dict[str, Any]:
    """Return a choice. With the mode "tokens", logprobs identify tokens by their ids."""
    token_ids = completion.token_ids
    places = completion.logprobs
    logprobs: Any = None
    if places is not None and body.output_mode == "text":
        count = None if body.sampling_params.logprob_token_ids else body.sampling_params.logprobs
        token_bytes = call.server.llm.get_tokenizer().token_bytes
        logprobs = chat_logprobs(token_ids, places, count, call.tokens_as_ids, token_bytes)
    elif places is not None:
        logprobs = token_id_logprobs(token_ids, places)
    return {
        "index": completion.index,
        "token_ids": token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": logprobs,
        **({"text": completion.text} if body.output_mode == "text" else {}),
    }
