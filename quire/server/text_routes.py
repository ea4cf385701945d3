"""POST /tokenize, POST /detokenize"""

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.engine.async_llm import LONG_PROMPT
from quire.server.errors import ApiError, bad_value, json_response
from quire.server.generation import Server
from quire.server.protocol import DetokenizeRequest, TokenizeRequest
from quire.server.responses import Text, Tokens
from quire.server.routing import StrictRoute, answers

router = APIRouter(route_class=StrictRoute)


@router.post("/tokenize", responses=answers(Tokens), response_model=None)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    server.accept(body)
    if (body.prompt is None) is (body.messages is None):
        raise ApiError(400, "one of prompt and messages is needed", param="prompt")
    text = body.prompt if body.messages is None else await server.render(body.messages, body)
    assert text is not None
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    tokenizer = server.llm.get_tokenizer()
    try:
        if len(text) > LONG_PROMPT:
            token_ids = await asyncio.to_thread(tokenizer.encode, text, special)
        else:
            token_ids = tokenizer.encode(text, special)
    except ValueError as error:
        raise bad_value(error, (), "prompt") from error
    strings = [tokenizer.id_to_token(token_id) or "" for token_id in token_ids] if body.return_token_strs else None
    answer: Tokens = {
        "count": len(token_ids),
        "max_model_len": server.llm.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }
    return json_response(answer)


@router.post("/detokenize", responses=answers(Text), response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    server.accept(body)
    size = server.llm.processor.vocab_size
    if outside := next((token_id for token_id in body.tokens if token_id >= size), None):
        raise ApiError(400, f"tokens: {outside} is outside the vocabulary of {size}", param="tokens")
    decode = partial(server.llm.get_tokenizer().decode, body.tokens, skip_special_tokens=False)
    answer: Text = {"prompt": await asyncio.to_thread(decode) if len(body.tokens) > LONG_PROMPT else decode()}
    return json_response(answer)
