"""Sends each request to the app of its model, and loads the model first if necessary."""

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from pydantic import BaseModel
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.checkpoints.created import CreatedModels
from quire.config.engine import ServerConfig
from quire.server.bodies import HeldBody
from quire.server.control import check_admin
from quire.server.errors import ApiError, json_response, path_in
from quire.server.middleware import header
from quire.server.multimodel.early_stream import EarlyStream
from quire.server.multimodel.rules import RuledRequests
from quire.server.multimodel.served_model import ServedModel
from quire.server.multimodel.table import ModelTable
from quire.server.ollama.bodies import is_zero
from quire.server.ollama.generate import Reply
from quire.server.ollama.state import LATEST
from quire.server.routing import parse_body

_NULL = msgspec.Raw(b"null")
_EMPTY = (b"null", b'""', b"[]")
_FORM_FIELD = re.compile(
    rb'\r\ncontent-disposition: *form-data; *name="?(model|stream)"?\r\n\r\n([^\r\n]*)\r\n--', re.I
)


class _Fields(msgspec.Struct):
    """The fields of a body that the dispatcher reads."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    source: str | None = None
    stream: Any = None
    keep_alive: Any = None
    prompt: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL


def _named(fields: _Fields) -> str | None:
    return fields.model or fields.name


# Bodies whose field `model` is not the model that they use.
_BASES: dict[str, Callable[[_Fields], str | None]] = {
    "/api/create": lambda fields: fields.from_,
    "/api/copy": lambda fields: fields.source,
}


class _RoutedBody(BaseModel):
    """The same, to report what is wrong with a body."""

    model: str | None = None
    name: str | None = None


class _Wanted:
    """What a request asks for. name: of the model, as the client wrote it. streams: whether the response is a stream.
    unloads: whether it only asks Ollama's API to unload the model."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        """Raises ApiError for a body that is no JSON object."""
        path = path_in(scope)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        is_form = (header(scope, b"content-type") or b"").lower().startswith(b"multipart/form-data")
        fields = _form_fields(body) if is_form else _json_fields(body)
        of_query = query.get("model", [None])[0]
        self.name = _BASES.get(path, _named)(fields) or of_query
        self.may_load = query.get("autoload", ["true"])[0].lower() not in ("false", "0")
        is_ollama = path in ("/api/generate", "/api/chat")
        self.streams = fields.stream is not False if is_ollama else fields.stream is True
        content = fields.messages if path == "/api/chat" else fields.prompt
        self.unloads = is_ollama and bytes(content) in _EMPTY and is_zero(fields.keep_alive)


def _json_fields(body: bytes) -> _Fields:
    if not body:
        return _Fields()
    try:
        return msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the route's parser says what is wrong
        found = parse_body(_RoutedBody, body)
        return _Fields(model=found.model, name=found.name)


def _form_fields(body: bytes) -> _Fields:
    found = {name.lower(): value for name, value in _FORM_FIELD.findall(b"\r\n" + body)}
    model = found.get(b"model", b"").decode("utf-8", "replace")
    return _Fields(model=model or None, stream=found.get(b"stream", b"").lower() == b"true")


class Dispatcher:
    """ASGI middleware in front of the app that answers for all models together.

    created: the models that clients of Ollama's API have created. routes: those of one model; other requests go to
    `app`. controls: those that operate on a loaded model, and never load it. watches: those that do not keep a model
    loaded. rules: a semantic router, if there is one.
    """

    def __init__(
        self,
        app: ASGIApp,
        table: ModelTable,
        created: CreatedModels,
        config: ServerConfig,
        routes: Iterable[BaseRoute],
        controls: Iterable[BaseRoute],
        watches: Iterable[BaseRoute],
        rules: RuledRequests | None = None,
    ) -> None:
        self.app = app
        self._rules = rules
        self._table = table
        self._created = created
        self._config = config
        self._routes = _Routes(routes)
        self._controls = _Routes(controls)
        self._watches = _Routes(watches)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self._controls.match(scope):
            await self._control(scope, receive, send)
        elif self._watches.match(scope):
            await self._watch(scope, receive, send)
        elif self._routes.match(scope):
            await self._dispatch(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if self._rules is not None:
            ruled = await self._rules.apply(scope, body, send)
            if ruled is None:
                return
            body, send = ruled
        wanted = _Wanted(scope, body)
        again = _replayed(body, receive)
        del body  # it may be large
        model = await self._find(scope, wanted.name)
        if wanted.unloads and model.loaded is None:
            reply = Reply(wanted.name or model.name, is_chat=path_in(scope) == "/api/chat")
            await json_response(reply.part(done=True, done_reason="unload"))(scope, receive, send)
            return
        if not model.is_open and not wanted.may_load:
            raise ApiError(400, "model is not loaded", param="model", code="model_not_loaded")
        if model.is_open:
            app = model.begin().app
        elif wanted.streams and self._config.sse_keep_alive_interval:
            await self._dispatch_stream(model, wanted.name or model.name, scope, again, send)
            return
        else:
            held: HeldBody = scope["state"]["body"]
            app = (await held.unless_left(self._table.acquire(model))).app
        await self._run(model, app, scope, again, send)

    async def _dispatch_stream(self, model: ServedModel, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Load the model, and begin the stream if that takes longer than a stream may be silent."""
        held: HeldBody = scope["state"]["body"]
        interval = self._config.sse_keep_alive_interval
        acquiring = asyncio.create_task(held.unless_left(self._table.acquire(model)))
        done, _ = await asyncio.wait((acquiring,), timeout=interval)
        if done:
            await self._run(model, acquiring.result().app, scope, receive, send)
            return
        stream = EarlyStream(scope, send, name, interval)
        try:
            await stream.begin()
            loaded = await acquiring
        except ApiError as error:
            await stream.fail(error)
            return
        finally:
            if not acquiring.done():
                acquiring.cancel()
                stream.close()
        try:
            await self._run(model, loaded.app, scope, receive, stream.forward)
        finally:
            stream.close()

    async def _run(self, model: ServedModel, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request that has acquired its model."""
        held: HeldBody = scope["state"]["body"]
        loaded = model.loaded
        if loaded is not None:
            held.large = loaded.app.state.large_body
        try:
            await app(scope, receive, send)
        finally:
            self._table.release(model)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(self._config)
        body = await _read(receive)
        model = await self._find(scope, _Wanted(scope, body).name)
        if not model.is_open:
            raise ApiError(409, f"the model {model.name!r} is not loaded", param="model", code="model_not_loaded")
        await self._run(model, model.begin().app, scope, _replayed(body, receive), send)

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = await self._find(scope, _Wanted(scope, b"").name)
        loaded = model.loaded
        if loaded is None:
            loaded = await self._table.acquire(model)
            self._table.release(model)
        await loaded.app(scope, receive, send)

    async def _find(self, scope: Scope, name: str | None) -> ServedModel:
        """Return the requested model. Names in Ollama's API may have the tag `latest`, and may be those of created
        models. Raises ApiError."""
        if name is None or not path_in(scope).startswith("/api/") or self._table.get(name) is not None:
            return await self._table.find(name)
        name = name.removesuffix(LATEST)
        created = (await asyncio.to_thread(self._created.all)).get(name)
        base = None if created is None else self._table.of_path(created.base)
        return base or await self._table.find(name)


class _Routes:
    """Routes by path."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._methods: dict[str, set[str]] = {}
        self._others: list[Route] = []
        for route in routes:
            assert isinstance(route, Route)
            if "{" in route.path:
                self._others.append(route)
            else:
                self._methods.setdefault(route.path, set()).update(route.methods or ())

    def match(self, scope: Scope) -> bool:
        path = path_in(scope)
        method = scope["method"]
        if path in self._methods:
            return method in self._methods[path]
        return any(method in (route.methods or ()) and route.path_regex.match(path) for route in self._others)


async def _read(receive: Receive) -> bytes:
    """Return the whole body. Raises ApiError if the client disconnects."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client closed the connection")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return ASGI's `receive` for a request whose body was read."""
    parts = [body]

    async def again() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return again
