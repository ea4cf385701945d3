"""Ollama's API: POST /api/embed and the older /api/embeddings."""

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.server.errors import json_response
from quire.server.fields import Positive, Strings
from quire.server.ollama.bodies import ANSWERS, KeptModel, OllamaRoute
from quire.server.pooling import EmbeddingRequest, PoolingCall
from quire.server.routing import validated
from quire.server.vectors import Values


class EmbedRoute(OllamaRoute):
    names = {**OllamaRoute.names, "truncate_prompt_tokens": "truncate"}  # noqa: RUF012  (read only)


router = APIRouter(route_class=EmbedRoute)


class EmbedRequest(KeptModel):
    input: str | Strings = Field(description="A text, or several.")
    truncate: bool | None = Field(None, description="false refuses texts that are too long; default: true.")
    dimensions: Positive | None = Field(None, description="Keep so many elements of each embedding (Matryoshka).")


class OldEmbeddingRequest(KeptModel):
    prompt: str | None = None


@router.post("/api/embed", responses=ANSWERS, response_model=None)
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Return normalized embeddings."""
    began = time.monotonic()
    name = body.accepted(request)
    texts = [body.input] if isinstance(body.input, str) else body.input
    vectors, num_tokens = await _vectors(request, body, [text for text in texts if text], "input", True)
    found = iter(vectors)
    if texts == [""]:
        texts = []
    answer = {
        "model": name,
        "embeddings": [next(found).tolist() if text else [] for text in texts],
        "total_duration": round((time.monotonic() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return json_response(answer)


@router.post("/api/embeddings", responses=ANSWERS, response_model=None)
async def embed_prompt(body: OldEmbeddingRequest, request: Request) -> Response:
    """Return one embedding, not normalized."""
    body.accepted(request)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _vectors(request, body, texts, "prompt", False)
    return json_response({"embedding": vectors[0].tolist() if vectors else []})


async def _vectors(
    request: Request, body: KeptModel, texts: list[str], field: str, normalized: bool
) -> tuple[list[Values], int]:
    """Return the embedding of each text, and the total number of tokens. Raises ApiError."""
    dimensions = truncate = None
    if isinstance(body, EmbedRequest):
        dimensions = body.dimensions
        truncate = body.truncate
    fields: dict[str, Any] = {"model": body.model, "use_activation": normalized}
    fields |= {"truncate_prompt_tokens": None if truncate is False else -1, "dimensions": dimensions}
    translated = validated(EmbeddingRequest, fields)
    call = PoolingCall(request.app.state.server, request, translated, "embd")
    if not texts:
        return [], 0
    params = call.params_of(translated, dimensions=dimensions, task="embed")
    return await call.pool(texts, field, params), call.tokens
