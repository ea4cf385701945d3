"""POST /tokenize, POST /detokenize"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.bodies import HeldBody
from quire.server.errors import ApiError, bad_value, json_response
from quire.server.generation import Server
from quire.server.protocol import DetokenizeRequest, Rendering, TokenizeRequest
from quire.server.responses import Tokens
from quire.server.routing import StrictRoute, answers

router = APIRouter(route_class=StrictRoute)


@router.post("/tokenize", responses=answers(Tokens), response_model=None)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    held: HeldBody = request.state.body
    server.accept(body)
    if (body.prompt is None) is (body.messages is None):
        raise ApiError(400, "one of prompt and messages is needed", param="prompt")
    text = body.prompt if body.messages is None else await server.render(body.messages, body, held)
    assert text is not None
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    try:
        server.llm.processor.check_length(text)
        response: Response = await held.run(_tokenize, server, text, special, bool(body.return_token_strs))
    except ValueError as error:
        raise bad_value(error, Rendering.model_fields, "prompt" if body.messages is None else "messages") from error
    return response


def _tokenize(server: Server, text: str, add_special_tokens: bool, return_strings: bool) -> Response:
    server.llm.processor.check_count(text)
    tokenizer = server.llm.get_tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens)
    answer: Tokens = {
        "count": len(token_ids),
        "max_model_len": server.llm.max_model_len,
        "tokens": token_ids,
        "token_strs": [tokenizer.id_to_token(i) or "" for i in token_ids] if return_strings else None,
    }
    return json_response(answer)


@router.post("/detokenize", responses=answers(dict[str, str]), response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    held: HeldBody = request.state.body
    server.accept(body)
    response: Response = await held.run(_detokenize, server, body.tokens)
    return response


def _detokenize(server: Server, token_ids: list[int]) -> Response:
    size = server.llm.processor.vocab_size
    if outside := next((token_id for token_id in token_ids if token_id >= size), None):
        message = f"tokens: token id {outside} is out of vocabulary; the model has {size} tokens"
        raise ApiError(400, message, param="tokens")
    return json_response({"prompt": server.llm.get_tokenizer().decode(token_ids, skip_special_tokens=False)})
