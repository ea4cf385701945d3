"""Embeddings, scores and rankings: the APIs of OpenAI, Cohere, Jina and vLLM for pooling models."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import AfterValidator, AliasChoices, BaseModel, Field
from starlette.responses import Response

from quire.engine.pooling import Pair, array
from quire.engine.processor import ProcessedRequest, PromptFields
from quire.engine.scoring import scoring
from quire.messages.errors import error_text
from quire.messages.outputs import RequestOutput
from quire.messages.pooling_params import PoolingParams, PoolingTask
from quire.server.errors import ApiError, bad_value, json_response
from quire.server.fields import MAX_INT, TABLES, Count, Positive, Prompts, Strings, fail
from quire.server.generation import SLICE, PromptCall, Server
from quire.server.messages import Messages
from quire.server.protocol import MAX_SEQUENCES, PromptBody, Rendering
from quire.server.routing import StrictRoute, answers
from quire.server.vectors import EmbedDType, EncodingFormat, Endianness, Values, bits, encoded, places, raw
from quire.text.tokenizer import Tokenizer

router = APIRouter(route_class=StrictRoute)
_REFUSED: dict[str, str] = TABLES["pooling"]["refused"]
Prompt = str | list[int] | PromptFields | Pair


class PoolingBody(PromptBody):
    """Common fields of requests for pooling models. null is treated as omitted."""

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Shorten each text to so many tokens; -1: to what the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side from which truncate_prompt_tokens removes tokens: right (default) or left."
    )
    padding: Literal["do_not_pad"] | None = Field(None, description="Texts are computed without padding.")
    use_activation: bool | None = Field(
        None,
        validation_alias=AliasChoices("use_activation", "normalize", "activation"),
        description="Normalize embeddings, or turn logits into scores; default: as the model does.",
    )
    user: str | None = None

    def unsupported(self) -> tuple[str, str] | None:
        given = self.model_extra or {}
        return next(((name, why) for name, why in _REFUSED.items() if given.get(name)), None)

    def params(self, **fields: Any) -> PoolingParams:
        given = {"truncate_prompt_tokens": self.truncate_prompt_tokens, "use_activation": self.use_activation, **fields}
        return PoolingParams(**given)


class InputBody(PoolingBody, Rendering):
    """A text, several texts, or a chat that is rendered to a text."""

    input: Prompts | None = None
    messages: Messages | None = Field(None, description="A chat, rendered with the chat template, instead of input.")
    prompt_name: str | None = Field(None, description="A prompt of the model's to put before each text.")
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="Settings of the preprocessing of pictures.")


class EmbeddingRequest(InputBody):
    encoding_format: EncodingFormat | None = Field(
        None, description="bytes: the body is all vectors, and the header `metadata` says where each is; bytes_only."
    )
    embed_dtype: EmbedDType | None = Field(None, description="Of base64 and bytes; default: float32.")
    endianness: Endianness | None = Field(None, description="Of base64 and bytes; default: the server's own order.")
    dimensions: Positive | None = Field(None, description="Keep so many elements of each embedding (Matryoshka).")


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = Field(None, description="What to compute; default: the model's usual one.")


class ClassifyRequest(InputBody):
    pass


def _texts(value: Any) -> list[str]:
    """Return one or several texts; each is a string, or an object with the key `text`."""
    items = value if isinstance(value, list) else [value]
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in items]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise fail("texts", "Input should be a string, a list of strings, or a list of objects with the key text")
    return texts


Texts = Annotated[Any, AfterValidator(_texts)]


class ScoringBody(PoolingBody):
    max_tokens_per_query: Count | None = Field(None, description="Shorten the first text to so many tokens; 0: do not.")
    max_tokens_per_doc: Count | None = Field(None, description="Shorten the second text to so many tokens; 0: do not.")

    instruction: str | None = Field(None, description="Short for chat_template_kwargs: {instruction: ...}.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the template that renders both texts."
    )

    def unsupported(self) -> tuple[str, str] | None:
        if (self.model_extra or {}).get("chat_template"):
            return "chat_template", "is not supported here: the server's option chat_template gives scores a template"
        return super().unsupported()

    @property
    def variables(self) -> dict[str, Any]:
        own = {} if self.instruction is None else {"instruction": self.instruction}
        return own | (self.chat_template_kwargs or {})


class ScoreRequest(ScoringBody):
    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class RerankRequest(ScoringBody):
    query: str
    documents: Texts
    top_n: int | None = Field(None, ge=0, le=MAX_INT, description="How many of the best to return; default, 0: all.")
    return_documents: bool | None = None


class EmbedContent(BaseModel):
    type: Literal["text"]
    text: str


class EmbedInput(BaseModel):
    content: list[EmbedContent] = Field(min_length=1)


class EmbedRequest(PoolingBody):
    """Cohere's embedding request."""

    texts: Strings | None = Field(None, min_length=1)
    inputs: list[EmbedInput] | None = Field(None, min_length=1, description="Texts in parts, in place of texts.")
    max_tokens: Positive | None = Field(None, description="Tokens of the longest text.")
    input_type: str | None = Field(None, description="search_query takes the model's prompt for queries, and so on.")
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = Field(
        None, description="binary, ubinary: signs of eight numbers in an integer."
    )
    output_dimension: Positive | None = None
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="END (default) and START shorten texts there."
    )

    @property
    def all_texts(self) -> list[str]:
        return self.texts or ["".join(part.text for part in item.content) for item in self.inputs or ()]

    def unsupported(self) -> tuple[str, str] | None:
        images = (self.model_extra or {}).get("images")
        return ("images", "is not supported: texts are") if images else super().unsupported()


class PoolingCall(PromptCall):
    """A request whose prompts are pooled."""

    def __init__(self, server: Server, request: Request, body: PoolingBody, prefix: str) -> None:
        super().__init__(server, request, body, prefix)
        if server.llm.frontend.pooling is None:
            message = "this model generates text, and makes no embeddings or scores; --runner pooling changes that"
            raise ApiError(400, message, param="model")
        self.body = body
        self.pooling = server.llm.frontend.pooling
        self.tokens = 0

    async def pool(self, prompts: Sequence[Prompt], field: str, params: PoolingParams, **options: Any) -> list[Values]:
        """Return the result of each prompt. field: the field of the prompts. options: see PoolingProcessor.process.

        Raises ApiError."""
        if len(prompts) > MAX_SEQUENCES:
            raise ApiError(400, f"{field} has {len(prompts)} texts; at most {MAX_SEQUENCES} are allowed", param=field)
        try:
            for start in range(0, len(prompts), SLICE):
                if start:
                    await asyncio.sleep(0)  # let other requests run
                slice = partial(self._process, prompts, start, params, options)
                self._requests += await self._held.run(slice)
        except (ValueError, TypeError, OverflowError) as error:
            raise bad_value(error, type(self.body).model_fields, field) from error
        self._held.release()
        outputs: dict[str, RequestOutput] = {}
        async for output in self.run():
            outputs[output.request_id] = output
        self.tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        completions = [outputs[request.request_id].outputs[0] for request in self._requests]
        return [array(completion.pooled) for completion in completions if completion.pooled is not None]

    def _process(
        self, prompts: Sequence[Prompt], start: int, params: PoolingParams, options: dict[str, Any]
    ) -> list[ProcessedRequest]:
        body = self.body
        made = []
        special = body.add_special_tokens is not False
        for index in range(start, min(start + SLICE, len(prompts))):
            prompt = prompts[index]
            if not isinstance(prompt, Pair):
                fields = _fields_of(prompt)
                prompt = fields | ({} if body.cache_salt is None else {"cache_salt": body.cache_salt})
            options = {"truncation_side": body.truncation_side, **options}
            made.append(
                self.pooling.process(
                    self._request_id(index, len(prompts)),
                    prompt,
                    params,
                    priority=body.priority or 0,
                    **{"add_special_tokens": special, **options},
                )
            )
        return made

    async def pool_input(self, body: InputBody, **fields: Any) -> list[Values]:
        """Return the result of each text of the field `input`, or of the chat."""
        if (body.input is None) is (body.messages is None):
            raise ApiError(400, "one of input and messages is needed", param="input")
        options: dict[str, Any] = {"prompt_name": body.prompt_name}
        params = self.params_of(body, **fields)
        if body.messages is not None:
            media = await self.server.load_media(body.messages, body.mm_processor_kwargs, self._held)
            text = await self.server.render(body.messages, body, self._held, media)
            options["add_special_tokens"] = bool(body.add_special_tokens)
            return await self.pool([text if media is None else media.prompt(text)], "messages", params, **options)
        given: Any = body.input
        several = isinstance(given, list) and not isinstance(given[0], int)
        return await self.pool(given if several else [given], "input", params, **options)

    def params_of(self, body: PoolingBody, **fields: Any) -> PoolingParams:
        try:
            return body.params(**fields)
        except (ValueError, TypeError) as error:
            raise bad_value(error, type(body).model_fields, "input") from error

    async def score(self, firsts: list[str], seconds: list[str], field: str) -> list[float]:
        """Return a score for each pair of texts."""
        body = self.body
        tokenizer = self.server.llm.get_tokenizer()
        assert isinstance(body, ScoringBody)
        try:
            for texts, most in ((firsts, body.max_tokens_per_query), (seconds, body.max_tokens_per_doc)):
                if most:
                    texts[:] = await self._held.run(_shortened, tokenizer, texts, most)
        except ValueError as error:
            raise ApiError(400, error_text(error), param=field) from error
        description = self.pooling.description
        if body.variables and self.pooling.render_pair is None and not description.is_listwise:
            given = "chat_template_kwargs" if body.chat_template_kwargs else "instruction"
            why = f"{given} is not supported by this model, whose scores have no template; put it into the query"
            raise ApiError(400, why, param=given)
        if description.pooler.is_classifier and not description.scores_pairs:
            raise ApiError(400, "this model's scores are not about pairs of texts", param="model")
        try:
            plan = scoring(self.pooling, firsts, seconds, body.variables)
        except ValueError as error:
            raise ApiError(400, error_text(error), param=field) from error
        return plan.scores(await self.pool(plan.prompts, field, self.params_of(body)))

    @property
    def longest(self) -> int:
        """Return the length of the longest prompt in tokens."""
        return max(len(request.prompt_token_ids) for request in self._requests)

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    def vectors(self, kind: str, field: str, values: Sequence[Values], body: EmbeddingRequest) -> Response:
        """Return a list of objects with one vector each, or the bytes of the vectors. kind: the objects' type."""
        encoding = body.encoding_format
        dtype = body.embed_dtype or "float32"
        order = body.endianness or "native"
        if encoding not in ("bytes", "bytes_only"):
            return self.listed(
                [{"object": kind, "index": i, field: encoded(x, encoding, dtype, order)} for i, x in enumerate(values)]
            )
        parts = [raw(vector, dtype, order) for vector in values]
        head = {"id": self.id, "created": self.created, "model": self.model}
        about = {**head, "data": places(values, parts, dtype, order), "usage": self.usage}
        headers = {"metadata": msgspec.json.encode(about).decode()} if encoding == "bytes" else {}
        return Response(b"".join(parts), 200, headers, "application/octet-stream")

    def listed(self, data: list[dict[str, Any]]) -> Response:
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return json_response({**head, "data": data, "usage": {**self.usage, "completion_tokens": 0}})


def _fields_of(prompt: str | list[int] | PromptFields) -> PromptFields:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _shortened(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> list[str]:
    return [tokenizer.shortened(text, most) for text in texts]


def _route(*paths: str) -> Callable[[Any], Any]:
    """Register an endpoint for several paths, of which only the first is documented."""

    def register(endpoint: Any) -> Any:
        for path in paths:
            shown = path == paths[0]
            router.post(path, responses=answers(dict[str, Any]), response_model=None, include_in_schema=shown)(endpoint)
        return endpoint

    return register


@_route("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    call = PoolingCall(request.app.state.server, request, body, "embd")
    values = await call.pool_input(body, dimensions=body.dimensions)
    return call.vectors("embedding", "embedding", values, body)


@_route("/pooling")
async def pooling(body: PoolingRequest, request: Request) -> Response:
    call = PoolingCall(request.app.state.server, request, body, "pool")
    values = await call.pool_input(body, dimensions=body.dimensions, task=body.task)
    return call.vectors("pooling", "data", values, body)


@_route("/classify")
async def classify(body: ClassifyRequest, request: Request) -> Response:
    call = PoolingCall(request.app.state.server, request, body, "classify")
    labels = call.pooling.description.pooler.labels
    if "classify" not in call.pooling.description.tasks:
        raise ApiError(400, "this model is no classifier of texts", param="model")
    data = []
    for index, value in enumerate(await call.pool_input(body)):
        probs = value.tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": index, "label": labels[best], "probs": probs, "num_classes": len(probs)})
    return call.listed(data)


@_route("/v1/score", "/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    call = PoolingCall(request.app.state.server, request, body, "score")
    scores = await call.score(body.text_1, body.text_2, "text_1")
    return call.listed([{"object": "score", "index": i, "score": value} for i, value in enumerate(scores)])


@_route("/v1/rerank", "/v2/rerank", "/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    call = PoolingCall(request.app.state.server, request, body, "rerank")
    scores = await call.score([body.query], list(body.documents), "documents")
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents is not False:
        results = [{**result, "document": {"text": body.documents[result["index"]]}} for result in results]
    return json_response(
        {
            "id": call.id,
            "model": call.model,
            "usage": call.usage,
            "results": results,
            "meta": {"api_version": {"version": "2"}},
        }
    )


@_route("/v2/embed")
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Return embeddings in Cohere's format."""
    call = PoolingCall(request.app.state.server, request, body, "embd")
    prompts = call.pooling.description.files.prompts
    wanted = {"search_query": "query", "search_document": "document"}.get(body.input_type or "", body.input_type)
    if (body.texts is None) is (body.inputs is None):
        raise ApiError(400, "one of texts and inputs is needed", param="texts")
    texts = body.all_texts
    field = "inputs" if body.texts is None else "texts"
    keep = body.truncate_prompt_tokens or (None if body.truncate == "NONE" else body.max_tokens or -1)
    params = call.params_of(body, dimensions=body.output_dimension, truncate_prompt_tokens=keep)
    options = {"prompt_name": wanted if wanted in prompts else None}
    options |= {"truncation_side": "left"} if body.truncate == "START" else {}
    values = await call.pool(texts, field, params, **options)
    if body.truncate == "NONE" and body.max_tokens and (longest := call.longest) > body.max_tokens:
        message = f"max_tokens: a text has {longest} tokens; truncate may be END or START"
        raise ApiError(400, message, param="max_tokens")
    kinds = body.embedding_types or ["float"]
    if {"binary", "ubinary"} & {*kinds} and len(values[0]) % 8:
        raise ApiError(
            400, f"embedding_types: {len(values[0])} numbers are not a multiple of 8", param="embedding_types"
        )
    return json_response(
        {
            "id": call.id,
            "texts": texts,
            "response_type": "embeddings_by_type",
            "embeddings": {kind: [_of_type(value, kind) for value in values] for kind in kinds},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": call.tokens}},
        }
    )


def _of_type(values: Values, kind: str) -> Any:
    return bits(values, kind == "binary") if kind in ("binary", "ubinary") else encoded(values, kind)
