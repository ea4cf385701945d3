"""Disaggregated prefill: one server computes a request's prompt, another fetches its KV blocks and responds."""

import asyncio
import contextlib
import ipaddress
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec

from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.router.call import Call
from quire.router.client import OVERLOADED, NotTaken, not_taken, send
from quire.router.config import PrefillServer, RouteConfig
from quire.router.errors import RouteError
from quire.router.fleet import Backend, Fleet, Visit

MAX_ANSWER = 1 << 20  # bytes of a prefill server's response that are read so that the connection can be reused
ADDRESS_SECONDS = 10.0  # how long a resolved host address is used
_PARAMS = "kv_transfer_params"

# The paths with prompts, and the fields that limit a server's output after a prompt to the minimum.
_SHORT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1, "max_completion_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "store": False},
}
# Fields that do not affect the prompt, but lengthen the output or conflict with the fields above.
_OF_ANSWERS = frozenset(
    "stream_options n best_of min_tokens logprobs top_logprobs logprob_token_ids echo include return_token_ids "
    "return_prompt_text response_format text structured_outputs guided_json guided_regex guided_choice guided_grammar "
    "guided_whitespace_pattern structural_tag".split()
)
# Fields of requests whose prompt is unknown to the proxy, or that outlive the connection.
_ALONE = ("prompt_logprobs", "previous_response_id", "conversation", "background")
_SEVERAL_PROMPTS = re.compile(rb'\[\s*["\[]')
_LIST = msgspec.json.Decoder(list[msgspec.Raw])

Fields = Mapping[str, msgspec.Raw]


class Prefills:
    """The prefill servers, and the choice of requests that use them."""

    def __init__(self, config: RouteConfig, client: aiohttp.ClientSession, fleet: Fleet) -> None:
        self.client = client
        self.fleet = fleet
        self.max_attempts = config.max_retries + 1
        self.addresses = {b: Address(s) for b, s in zip(fleet.backends, config.prefill_servers, strict=True)}
        self._min_bytes = config.prefill_min_bytes

    def of(self, call: Call) -> "Prefill | None":
        """Return the prefill of a request; None if one server should handle the whole request."""
        short = _SHORT.get(call.target.partition("?")[0])
        if short is None or call.method != "POST" or len(call.body) < self._min_bytes:
            return None
        return Prefill(self, call, short) if _has_one_prompt(call.fields) else None


def _has_one_prompt(fields: Fields) -> bool:
    """Whether a request has exactly one prompt, which another server may compute."""
    if not fields or any(_is_set(fields, name) for name in _ALONE):
        return False
    if _is_set(fields, "echo") and _is_set(fields, "logprobs"):
        return False
    prompt = bytes(fields.get("prompt", b""))
    return not _SEVERAL_PROMPTS.match(prompt) or len(_LIST.decode(prompt)) == 1


def _is_set(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]) not in (b"null", b"false")


class Address:
    """The address from which KV blocks are fetched. Decode servers need an IP address, so host names are resolved."""

    def __init__(self, server: PrefillServer) -> None:
        self.port = server.port
        self._name = server.host
        self._host = ""
        self._until = 0.0
        with contextlib.suppress(ValueError):
            self._host = str(ipaddress.ip_address(server.host))
            self._until = float("inf")

    async def host(self) -> str:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until:
            found = await loop.getaddrinfo(self._name, None)
            self._host, self._until = str(found[0][4][0]), loop.time() + ADDRESS_SECONDS
        return self._host


class Prefill:
    """The prefill of one request. After `max_attempts` failures, the decode server computes the prompt itself."""

    def __init__(self, prefills: Prefills, call: Call, short: Mapping[str, Any]) -> None:
        self._prefills = prefills
        self._call = call
        self._short = short
        self._failed: set[Backend] = set()
        self._attempts_left = prefills.max_attempts
        self._computing: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def begin(self, decode: Visit) -> AsyncGenerator[bytes]:
        """Let a prefill server compute the prompt during this context. Yields the body for the decode server.

        decode: the visit at the decode server. It is interrupted if the prefill fails before this server responds.
        """
        try:
            yield await self._begin(decode)
        finally:
            if self._computing is not None:
                self._computing.cancel()

    async def _begin(self, decode: Visit) -> bytes:
        while (backend := self._choose()) is not None:
            begun: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
            self._computing = asyncio.create_task(self._compute(backend, decode, begun))
            if (body := await begun) is not None:
                return body
        return self._call.body

    def _choose(self) -> Backend | None:
        fleet = self._prefills.fleet
        if not self._attempts_left or not fleet.others(self._call, self._failed):
            return None
        return fleet.choose(self._call, self._failed)

    async def _compute(self, backend: Backend, decode: Visit, begun: "asyncio.Future[bytes | None]") -> None:
        """begun: receives the body for the decode server, or None if the prefill has already failed."""
        fleet = self._prefills.fleet
        transfer_id = uuid4().hex
        failure: Exception
        try:
            async with Visit(fleet, backend) as visit:
                try:
                    body = self._body({"do_remote_decode": True, "transfer_id": transfer_id})
                    decode_body = await self._decode_body(transfer_id, self._prefills.addresses[backend])
                    if not begun.done():
                        begun.set_result(decode_body)
                    await self._send(backend, visit, body)
                except (aiohttp.ClientError, OSError) as error:
                    raise not_taken(fleet, backend, error) from error
            return
        except TimeoutError:  # from the visit
            failure = NotTaken("lost", "it does not respond")
        except (NotTaken, RouteError) as error:
            failure = error
        except Exception as error:
            fields = {"request_id": self._call.request_id}
            logger.exception("Request %s: its prefill failed", self._call.request_id, extra={"fields": fields})
            failure = error
        self._fail(backend, failure)
        if begun.done():
            decode.interrupt("prefill")
        else:
            begun.set_result(None)

    def _fail(self, backend: Backend, failure: Exception) -> None:
        reason = failure.reason if isinstance(failure, NotTaken) else "failed"
        self._failed.add(backend)
        # Other servers would reject it as well. The decode server reports the reason to the client.
        self._attempts_left = 0 if reason == "refused" else self._attempts_left - 1
        backend.metrics.count_retry(reason)
        fields = {"request_id": self._call.request_id, "backend": backend.url, "reason": reason}
        logger.warning(
            "Request %s: prefill at %s: %s",
            self._call.request_id,
            backend.url,
            error_text(failure),
            extra={"fields": fields},
        )

    async def _send(self, backend: Backend, visit: Visit, body: bytes) -> None:
        """Send a request to a prefill server, and wait until it is done. Raises NotTaken for an error."""
        began = time.perf_counter()
        name = f"{self._call.request_id[:120]}-prefill"  # servers accept ids of up to 128 characters
        headers = [(key, name if key == "x-request-id" else value) for key, value in self._call.headers]
        async with send(self._prefills.client, backend, self._call, body, headers) as response:
            status = response.status
            backend.metrics.count_answer(status)
            if status >= 300:
                reason = "refused" if status < 500 else "failed"
                raise NotTaken("overloaded" if status in OVERLOADED else reason, f"status {status}")
            visit.answered()
            backend.metrics.first_byte.observe(time.perf_counter() - began)
            received = 0
            async for chunk in response.content.iter_any():
                received += len(chunk)
                if received > MAX_ANSWER:
                    break

    def _body(self, params: Mapping[str, Any]) -> bytes:
        """Return the body for a prefill server."""
        fields = {name: value for name, value in self._call.fields.items() if name not in _OF_ANSWERS}
        return msgspec.json.encode({**fields, **self._short, "stream": False, _PARAMS: params})

    async def _decode_body(self, transfer_id: str, address: Address) -> bytes:
        """Return the body for the decode server. Raises OSError."""
        params = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": await address.host(),
            "remote_port": address.port,
        }
        return msgspec.json.encode({**self._call.fields, _PARAMS: params})
