"""What a request says, in any of the APIs: its texts, and whether it has tools or media."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Api = Literal["chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate"]

APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate",
}
_MEDIA = frozenset(
    "image image_url input_image audio audio_url input_audio video video_url document file input_file".split()
)


class Said(NamedTuple):
    """text: the last text of the user. chars: the length of all texts. The rest: whether there are tools or media."""

    text: str
    chars: int
    tools: bool
    media: bool


def said(api: Api, body: dict[str, Any]) -> Said:
    """Read a request's body. Values of unexpected types are skipped: the server will refuse them."""
    turns = list(_turns(api, body))
    texts = [text for _, parts in turns for text in _texts(parts)]
    asked = next((" ".join(_texts(parts)) for role, parts in reversed(turns) if role == "user"), "")
    media = bool(body.get("images")) or any(_has_media(parts) for _, parts in turns)
    return Said(asked, sum(map(len, texts)), bool(body.get("tools") or body.get("functions")), media)


def without_last_text(api: Api, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the body without the text in which it may differ from a similar request, or None if the last turn is not
    only a text of the user."""
    name = {"completions": "prompt", "ollama_generate": "prompt", "responses": "input"}.get(api, "messages")
    value = body.get(name)
    if isinstance(value, str):
        return {**body, name: None}
    if name == "prompt" or not isinstance(value, list) or not value:
        return None
    last = value[-1]
    if not isinstance(last, dict) or last.get("role") != "user" or last.get("images"):
        return None
    content = last.get("content")
    is_text = isinstance(content, str) or (
        isinstance(content, list) and len(content) == 1 and _types(content) <= {"text", "input_text"}
    )
    return {**body, name: [*value[:-1], {**last, "content": None}]} if is_text else None


def _turns(api: Api, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (role, content) in the order of the prompt."""
    for name in ("system", "instructions"):
        if name in body:
            yield "system", body[name]
    if api in ("completions", "ollama_generate"):
        prompt = body.get("prompt")
        yield "user", prompt[0] if isinstance(prompt, list) and prompt else prompt
        return
    turns = body.get("input" if api == "responses" else "messages")
    if isinstance(turns, str):
        yield "user", turns
        return
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            content = turn.get("content")
            if turn.get("images"):  # Ollama's
                content = [content, {"type": "image"}]
            role = turn.get("role")
            only_results = _types(content) == {"tool_result"}
            yield (role if isinstance(role, str) and not only_results else "tool"), content


def _types(content: Any) -> set[Any]:
    return {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict) and isinstance(text := part.get("text"), str):
                yield text


def _has_media(content: Any) -> bool:
    return not _MEDIA.isdisjoint(kind for kind in _types(content) if isinstance(kind, str))
