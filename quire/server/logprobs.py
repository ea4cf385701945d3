"""Logprobs in the formats of the endpoints. JSON has no infinity, so -9999 replaces it, as in vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.messages.outputs import Logprob
from quire.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprobs, TokenLogprob
from quire.text.tokenizer import Tokenizer

Places = Sequence[Mapping[int, Logprob] | None]
_LOWEST = -9999.0


def _name(token_id: int, logprob: Logprob, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else logprob.decoded_token or ""


def _likeliest(place: Mapping[int, Logprob], count: int | None) -> list[tuple[int, Logprob]]:
    """Return the `count` likeliest tokens (-1: all). The place's own token is left out unless it is one of them. None:
    return all, since the request named the tokens."""
    if count is None:
        return list(place.items())
    ranked = sorted(place.items(), key=lambda item: item[1].rank or 0)
    return ranked if count == -1 else ranked[:count]


def completion_logprobs(
    token_ids: Sequence[int], places: Places, count: int | None, as_ids: bool, offset: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """count: the requested number, None for tokens that the request named. offset: characters of text before the first
    token."""
    logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, place in zip(token_ids, places, strict=True):
        if place is None:  # the first prompt token: nothing comes before it
            spelt = f"token_id:{token_id}" if as_ids else tokenizer.decode([token_id], skip_special_tokens=False)
            logprob = None
            top = None
        else:
            spelt = _name(token_id, place[token_id], as_ids)
            logprob = max(place[token_id].logprob, _LOWEST)
            top = {spelt: logprob}
            for other, value in _likeliest(place, count):  # of tokens with the same text, the likelier
                top.setdefault(_name(other, value, as_ids), max(value.logprob, _LOWEST))
        logprobs["text_offset"].append(offset)
        logprobs["token_logprobs"].append(logprob)
        logprobs["tokens"].append(spelt)
        logprobs["top_logprobs"].append(top)
        offset += len(spelt)
    return logprobs


def chat_logprobs(
    token_ids: Sequence[int], places: Places, count: int | None, as_ids: bool, token_bytes: Mapping[int, bytes]
) -> ChatLogprobs:
    """`bytes` are the token's own bytes, even if it ends within a character."""

    def entry(token_id: int, logprob: Logprob) -> TokenLogprob:
        name = _name(token_id, logprob, as_ids)
        value = max(logprob.logprob, _LOWEST)
        return {"token": name, "logprob": value, "bytes": list(token_bytes[token_id])}

    content: list[ChatTokenLogprob] = []
    for token_id, place in zip(token_ids, places, strict=True):
        assert place is not None
        top = [entry(*item) for item in _likeliest(place, count)]
        content.append({**entry(token_id, place[token_id]), "top_logprobs": top})
    return {"content": content}


def token_id_logprobs(token_ids: Sequence[int], places: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
    """Return logprobs for clients without a tokenizer. The token itself is also the first of top_logprobs, as in
    vLLM."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {"token_id": token_id, "logprob": max(logprob.logprob, _LOWEST), "rank": logprob.rank}

    return {
        "content": [
            {**entry(token_id, place[token_id]), "top_logprobs": [entry(*item) for item in place.items()]}
            for token_id, place in zip(token_ids, places, strict=True)
        ]
    }


def prompt_logprobs(places: Places) -> PromptLogprobs:
    """Return vLLM's format: for each place {token id: {logprob, rank, decoded_token}}, null for the first."""

    def entry(value: Logprob) -> dict[str, Any]:
        logprob = max(value.logprob, _LOWEST)
        return {"logprob": logprob, "rank": value.rank, "decoded_token": value.decoded_token}

    return [place if place is None else {str(i): entry(value) for i, value in place.items()} for place in places]
