"""Streams that begin before their model is loaded."""

import msgspec
from starlette.types import Message, Scope, Send

from quire.server.anthropic import MessageStream
from quire.server.errors import ApiError, path_in
from quire.server.ollama.generate import Reply
from quire.server.ollama.lines import LineStream, line
from quire.server.responses_api import ResponseStream
from quire.server.streams import EventStream, Sender

_KINDS: dict[str, type[EventStream]] = {
    "/v1/responses": ResponseStream,
    "/v1/messages": MessageStream,
    "/api/generate": LineStream,
    "/api/chat": LineStream,
}


class EarlyStream:
    """Sends the beginning of a stream and keep-alive messages, and then the stream of the model's app."""

    def __init__(self, scope: Scope, send: Send, name: str, interval: float) -> None:
        """name: of the model, as the client wrote it. interval: seconds between keep-alive messages."""
        self._scope = scope
        self._send = send
        path = path_in(scope)
        self._kind = _KINDS.get(path, EventStream)
        keep_alive = self._kind.keep_alive
        if self._kind is LineStream:
            keep_alive = line(Reply(name, is_chat=path == "/api/chat").part(done=False))
        self._keep_alive = keep_alive
        self._sender = Sender(send, interval, keep_alive)
        self._status = 200
        self._error = b""

    async def begin(self) -> None:
        content_type = self._kind.media_type.encode()
        headers = [(b"content-type", content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._sender.send(self._keep_alive)

    async def forward(self, message: Message) -> None:
        """ASGI's `send` for the model's app. An error response becomes the last event."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._sender.close()
        elif self._status == 200:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self._end(self._error)

    async def fail(self, error: ApiError) -> None:
        self._sender.close()
        self._scope["state"]["error"] = error
        await self._end(msgspec.json.encode(error.body(path_in(self._scope))))

    async def _end(self, error: bytes) -> None:
        body = self._kind.before_error + error + self._kind.after_error + self._kind.done
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def close(self) -> None:
        self._sender.close()
