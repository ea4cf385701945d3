"""Limits for clients that are not authenticated yet: how long the head of a request may take, and its maximum size.

With httptools, uvicorn limits neither: an endless header stays in memory and is copied with each piece that arrives.
"""

import asyncio
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.config.http import HttpLimits

if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = ABC

HEADERS_TOO_LARGE = 431
TIMED_OUT = 408
_SETTLE_SECONDS = 0.05  # a blocked event loop may first read pending data before a timeout fires


class HeadError(Exception):
    """The head or the trailers of a request are too large."""


class _Guarded(_Base):
    """uvicorn's protocol with limits. One timer runs whenever no request is being answered.

    It runs from the first byte of a head, or from the start of the connection, until the head is complete. A response
    can be complete before its request is; the rest of that request does not keep the connection open.
    """

    limits: HttpLimits

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._timer: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def _is_in_head(self) -> bool:
        """Whether the head of a request has started but is incomplete."""

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_unanswered(self) -> bool:
        """Whether no response has started, so that an error response can still be sent."""
        return not self.cycle.response_started and not getattr(self, "pipeline", None)

    @abstractmethod
    def _check(self, data: bytes) -> None:
        """Check the limit after the parser received the data. Raises HeadError if the head is too large."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # rejected, but the error response is not fully sent
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        try:
            self._check(data)
        except HeadError:
            self._refuse_head()
            return
        if self._is_answering and not self._is_in_head:
            self._unwatch()
        else:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg, "invalid_http")

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(_SETTLE_SECONDS, self._end_keep_alive)

    def _end_keep_alive(self) -> None:
        super().timeout_keep_alive_handler()
        # A client that does not read its response would otherwise keep the connection open.
        self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_timeout, self._settle)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self) -> None:
        self._timer = self.loop.call_later(_SETTLE_SECONDS, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if self._is_answering:  # the head belongs to a request that waits for the previous one
            self._watch()
        elif self._is_in_head:
            seconds = f"{self.limits.header_timeout:g} s"
            self._refuse(TIMED_OUT, f"the head of the request did not arrive within {seconds}", "header_timeout")
        else:
            self._close()

    def _refuse_head(self) -> None:
        size = self.limits.h11_max_incomplete_event_size
        count = self.limits.h11_max_header_count
        message = f"the head of a request may have {size} bytes and {count} headers at most"
        self._refuse(HEADERS_TOO_LARGE, message, "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error in OpenAI's format and close, since the start of the next request is unknown."""
        if not self._is_answering or self._is_unanswered:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = msgspec.json.encode({"error": error})
            phrase = "Request Header Fields Too Large" if status == HEADERS_TOO_LARGE else HTTPStatus(status).phrase
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self._close()

    def _close(self) -> None:
        self._unwatch()
        self.transport.close()
        self.loop.call_later(self.limits.header_timeout, self.transport.abort)


class _Connection(h11.Connection):
    """Measures complete heads. h11 itself limits only incomplete ones.

    is_too_large: whether h11 or this class rejected a head for its size.
    """

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(h11.SERVER, limits.h11_max_incomplete_event_size)
        self._limits = limits
        self.is_too_large = False

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request | h11.EndOfMessage):
                self._check(event)
        except h11.RemoteProtocolError as error:
            self.is_too_large = error.error_status_hint == HEADERS_TOO_LARGE
            raise
        return event

    def _check(self, event: h11.Request | h11.EndOfMessage) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in event.headers)
        if isinstance(event, h11.Request):
            size += len(event.target)
        if size > self._limits.h11_max_incomplete_event_size or len(event.headers) > self._limits.h11_max_header_count:
            raise h11.RemoteProtocolError("the headers are too large", HEADERS_TOO_LARGE)


class _WithH11(_Guarded, H11Protocol):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._measured = self.conn = _Connection(self.limits)

    @property
    def _is_in_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _check(self, data: bytes) -> None:
        if self._measured.is_too_large:
            raise HeadError

    def send_400_response(self, msg: str) -> None:
        if not self._measured.is_too_large:
            super().send_400_response(msg)


def _with_httptools() -> Any:  # noqa: C901  # all methods of the class in it are counted
    """Return the class for httptools. Raises ImportError if it is not installed."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class WithHttpTools(_Guarded, HttpToolsProtocol):  # type: ignore[misc]
        """Counts the parts of a head that the parser reports, and the data it buffers: it reports a header only at its
        end."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._in_head = self._heard = self._is_too_large = False
            self._bytes = self._silent = self._count = 0

        @property
        def _is_in_head(self) -> bool:
            return self._in_head

        def _check(self, data: bytes) -> None:
            self._silent = 0 if self._heard else self._silent + len(data)
            self._heard = False
            self._check_size()

        def send_400_response(self, msg: str) -> None:
            if self._is_too_large:  # raised in one of the parser's callbacks
                self._refuse_head()
            else:
                super().send_400_response(msg)

        def _check_size(self) -> None:
            is_large = self._bytes + self._silent > self.limits.h11_max_incomplete_event_size
            if is_large or self._count > self.limits.h11_max_header_count:
                self._is_too_large = True
                raise HeadError

        def _hear(self, size: int) -> None:
            self._heard = True
            self._silent = 0
            self._bytes += size
            self._check_size()

        def on_message_begin(self) -> None:
            self._in_head = True
            self._bytes = self._count = 0
            self._hear(0)
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._hear(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count += 1
            self._hear(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._hear(0)
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._heard = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._heard = True
            super().on_message_complete()

    return WithHttpTools


def limited_protocol(limits: HttpLimits, parser: str = "auto") -> type[asyncio.Protocol]:
    """Return a uvicorn protocol class with these limits. parser: httptools, h11, or the first one that is installed."""
    base: Any = _WithH11
    if parser != "h11":
        try:
            base = _with_httptools()
        except ImportError:
            if parser != "auto":
                raise
    return cast(type[asyncio.Protocol], type("Guarded", (base,), {"limits": limits}))
