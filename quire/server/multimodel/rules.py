"""The semantic router in a server with several models."""

from starlette.types import Message, Scope, Send

from quire.observability.logging import logger
from quire.semantic.recorder import Recorder
from quire.semantic.router import Decision, SemanticRouter
from quire.server.errors import ApiError, path_in
from quire.server.middleware import header


class RuledRequests:
    """Lets the rules change requests, refuse them, or answer them from the cache.

    names: the names of models to which the rules apply, without "*".
    """

    def __init__(self, router: SemanticRouter) -> None:
        self._router = router
        self.names = [name for name in router.rules.models if name != "*"]

    async def apply(self, scope: Scope, body: bytes, send: Send) -> tuple[bytes, Send] | None:
        """Return the body of a request, and how to send its response; None if it has been answered. Raises ApiError if
        a rule refuses the request."""
        decision = await self._router.decide(path_in(scope), body, _key(scope))
        if decision is None:
            return body, send
        fields = {"rule": decision.rule, "model": decision.model, **decision.because}
        logger.info("%s: %s", path_in(scope), decision.header, extra={"fields": fields})
        named = (b"x-quire-route", decision.header.encode())
        if decision.action.refuse is not None:
            headers = {"X-Quire-Route": decision.header}
            raise ApiError(400, decision.action.refuse, code="content_filter", headers=headers)
        if decision.hit is not None:
            answer = decision.hit.answer
            length = (b"content-length", str(len(answer.body)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [*answer.headers, length, named]})
            await send({"type": "http.response.body", "body": answer.body})
            return None
        others = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope["headers"] = [*others, (b"content-length", str(len(decision.body)).encode())]
        return decision.body, self._recorded(decision, named, send)

    def _recorded(self, decision: Decision, named: tuple[bytes, bytes], send: Send) -> Send:
        """Return ASGI's `send` for the response to a request: it gets a header, and is stored in the cache if there is
        one."""
        cache = self._router.cache
        recorder = None if cache is None or decision.remember is None else Recorder(decision, cache.largest)

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                if recorder is not None:
                    recorder.begin(message["status"], message["headers"])
                message = {**message, "headers": [*message["headers"], named]}
            elif recorder is not None and message["type"] == "http.response.body":
                recorder.add(message.get("body", b""))
                if not message.get("more_body", False):
                    recorder.end()
            await send(message)

        return forward


def _key(scope: Scope) -> bytes:
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else header(scope, b"x-api-key") or b""
