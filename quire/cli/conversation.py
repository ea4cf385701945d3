"""A conversation stored in a file. It has the format of a request to /v1/chat/completions, without the model."""

import json
from pathlib import Path
from typing import Any

from quire.cli.sampling import PARAMETERS
from quire.messages.errors import error_text

Messages = list[dict[str, str]]
_FIELDS = {"messages", "ignore_eos", *PARAMETERS}
_ROLES = ("system", "user", "assistant")


def save(path: Path, messages: Messages, options: dict[str, Any]) -> None:
    """Write a conversation, with its sampling parameters.

    A file is only overwritten if it contains a conversation. Raises ValueError and OSError.
    """
    if path.exists():
        try:
            load(path)
        except ValueError as error:
            raise ValueError(f"{error_text(error)}, so it is not overwritten") from error
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    text = json.dumps({"messages": messages, **given}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> tuple[Messages, dict[str, Any]]:
    """Return the messages and sampling parameters in a file. Raises ValueError and OSError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: {error_text(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise ValueError(f'{path} holds no conversation: it must be an object with "messages"')
    unknown = sorted(content.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"{path} has a field that quire chat does not know: {unknown[0]}")
    for i, message in enumerate(content["messages"]):
        is_message = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not is_message or message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise ValueError(f"{path}: messages[{i}] must have a role ({', '.join(_ROLES)}) and a text as content")
    return content.pop("messages"), content
