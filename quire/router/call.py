"""A request that passes through the proxy, and the parts of its body that affect routing."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from quire.server.spans import ServerSpan

LARGE_BODY = 8 << 20  # bytes; larger bodies are not parsed, since other requests would wait
PIECE = 256  # bytes of text, about 64 tokens; prefixes are compared in pieces of this size
MAX_PIECES = 4096  # per request: an equal prefix of 1 MiB is enough

# The body fields that come first in a prompt, in the order in which chat templates use them, and the fields with the
# growing text.
_HEAD = ("model", "cache_salt", "tools", "system", "instructions")
_TEXT = ("messages", "prompt", "input")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME = msgspec.json.Decoder(str)


class Call:
    """A request. target: its path with the query. headers: the headers to forward. body: the complete body; it is
    dropped as soon as the request will not be sent again."""

    def __init__(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes, request_id: str
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.request_id = request_id
        self.session: bytes | None = None
        self.span: ServerSpan | None = None  # the request's span, if tracing is enabled
        self.model: str | None = None  # if only servers with this model can answer
        self.tokens: list[int] = []  # the prompt's tokens, if the policy needs them

    @cached_property
    def fields(self) -> dict[str, msgspec.Raw]:
        """Return the fields of the body as raw JSON, if it is a JSON object."""
        if not self.body.startswith(b"{") or len(self.body) > LARGE_BODY:
            return {}
        try:
            return _FIELDS.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return {}

    @property
    def requested_model(self) -> str | None:
        """The field `model` of the body, if it is a string."""
        try:
            return _NAME.decode(self.fields["model"]) if "model" in self.fields else None
        except msgspec.DecodeError:
            return None

    def replace_body(self, body: bytes) -> None:
        self.drop_body()
        self.body = body

    def drop_body(self) -> None:
        self.body = b""
        self.__dict__.pop("fields", None)  # they reference the body


def text_pieces(call: Call) -> list[int]:
    """Return a hash for each full piece of a request's text, which includes all text before it.

    The text is the JSON as the client sent it. The next request of a conversation begins with the same bytes.
    """
    fields = call.fields
    text = next((bytes(fields[name]) for name in _TEXT if name in fields), b"")
    piece = hash(tuple((name, bytes(fields[name])) for name in _HEAD if name in fields))
    hashes = []
    for end in range(PIECE, min(len(text), MAX_PIECES * PIECE) + 1, PIECE):
        piece = hash((piece, text[end - PIECE : end]))
        hashes.append(piece)
    return hashes
