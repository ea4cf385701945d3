"""A request on its way through the proxy, and what its body says about where it should go."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from quire.server.spans import ServerSpan

LARGE_BODY = 8 << 20  # bytes; larger bodies are not parsed, so that others need not wait for it
PIECE = 256  # bytes of text, about 64 tokens; prefixes are compared in pieces of so many
MAX_PIECES = 4096  # of one request: texts of 1 MiB that begin alike are close enough

# The fields of the APIs' bodies that a prompt begins with, in the order in which chat templates use them, and those
# with the text that grows.
_HEAD = ("model", "cache_salt", "tools", "system", "instructions")
_TEXT = ("messages", "prompt", "input")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Call:
    """A request: target is its path with the query. headers: to be sent on. body: all of it; it is dropped as soon as
    the request will not be sent again."""

    def __init__(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes, request_id: str
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.request_id = request_id
        self.session: bytes | None = None
        self.span: ServerSpan | None = None  # of the request, with traces
        self.tokens: list[int] = []  # of the prompt, if the policy has asked for them

    @cached_property
    def fields(self) -> dict[str, msgspec.Raw]:
        """The fields of the body as JSON, if it is a JSON object."""
        if not self.body.startswith(b"{") or len(self.body) > LARGE_BODY:
            return {}
        try:
            return _FIELDS.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return {}

    def drop_body(self) -> None:
        self.body = b""
        self.__dict__.pop("fields", None)  # they are parts of the body


def text_pieces(call: Call) -> list[int]:
    """The hash of each full piece of a request's text and of all that is before it.

    The text is JSON as the client has written it. The next request of a conversation begins with the same bytes.
    """
    fields = call.fields
    text = next((bytes(fields[name]) for name in _TEXT if name in fields), b"")
    piece = hash(tuple((name, bytes(fields[name])) for name in _HEAD if name in fields))
    hashes = []
    for end in range(PIECE, min(len(text), MAX_PIECES * PIECE) + 1, PIECE):
        piece = hash((piece, text[end - PIECE : end]))
        hashes.append(piece)
    return hashes
