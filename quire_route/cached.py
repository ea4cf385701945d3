"""Which servers have which prefixes in their caches, as their KV events say (docs/kv-events.md, vLLM's format)."""

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from quire.messages.errors import error_text
from quire.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from quire.metrics.logging import logger
from quire_route.call import Call
from quire_route.fleet import Backend, Fleet

_TOKENIZE_SECONDS = 1.0  # a request does not wait longer to know its tokens
_CHAT = """messages tools documents chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens model""".split()
_BATCHES = msgspec.msgpack.Decoder(KVEventBatch)
_TOKENS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IDS = msgspec.json.Decoder(list[int])


class CachedPrefixes:
    """For each block of tokens and all that is before it, a bit for each server that has it.

    Only the events of KV group 0 count, which keeps the most tokens. What a server has is unknown until it has told.
    """

    def __init__(self, count: int) -> None:
        self.block_size = 0  # unknown before the first event
        self._adapters: set[str] = set()
        self._servers: dict[int, int] = {}  # by the hash of a prefix
        self._prefixes: list[dict[Hashable, int]] = [{} for _ in range(count)]  # by each server's own hashes

    def apply(self, server: int, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.forget(server)
            elif event.group_idx not in (None, 0):
                continue
            elif isinstance(event, BlockStored):
                self._store(server, event)
            else:
                self._remove(server, event)

    def _store(self, server: int, event: BlockStored) -> None:
        known, size = self._prefixes[server], event.block_size
        self.block_size = self.block_size or size
        if event.parent_block_hash is None:
            extra = event.extra_keys[0] if event.extra_keys else None
            prefix: int | None = _root(extra[0] if extra else None, event.lora_name)
            self._adapters.update([] if event.lora_name is None else [event.lora_name])
        else:
            prefix = known.get(event.parent_block_hash)
        if prefix is None or size != self.block_size:
            return  # what is before it was stored before the proxy listened, or other servers have other blocks
        for index, name in enumerate(event.block_hashes):
            prefix = hash((prefix, *event.token_ids[index * size : (index + 1) * size]))
            known[name] = prefix
            self._servers[prefix] = self._servers.get(prefix, 0) | 1 << server

    def _remove(self, server: int, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            if (prefix := self._prefixes[server].pop(name, None)) is not None:
                self._lose(server, prefix)

    def _lose(self, server: int, prefix: int) -> None:
        left = self._servers.get(prefix, 0) & ~(1 << server)
        if left:
            self._servers[prefix] = left
        else:
            self._servers.pop(prefix, None)

    # ---- what a Router asks

    def pieces(self, call: Call) -> list[int]:
        """The hash of each full block of the request's tokens, as far as some server has it."""
        if not call.tokens or not self.block_size:
            return []
        salt, model = (_text(call, name) for name in ("cache_salt", "model"))
        prefix, size, found = _root(salt, model if model in self._adapters else None), self.block_size, []
        for start in range(0, len(call.tokens) - size + 1, size):
            prefix = hash((prefix, *call.tokens[start : start + size]))
            if prefix not in self._servers:
                break
            found.append(prefix)
        return found

    def longest(self, pieces: Sequence[int], ready: list[int]) -> list[int]:
        """Those of the ready servers that have the longest part of a prompt; all of them if none has any."""
        found = sum(1 << server for server in ready)
        for piece in pieces:
            here = found & self._servers.get(piece, 0)
            if not here:
                break
            found = here
        return [server for server in ready if found >> server & 1]

    def add(self, pieces: Sequence[int], core: int) -> None:
        """Only events say what a server has."""

    def forget(self, server: int) -> None:
        for prefix in self._prefixes[server].values():
            self._lose(server, prefix)
        self._prefixes[server] = {}


def _root(salt: str | None, adapter: str | None) -> int:
    return hash((salt, adapter))


def _text(call: Call, name: str) -> str | None:
    """A field of the body that is text."""
    try:
        return msgspec.json.decode(call.fields[name], type=str) if name in call.fields else None
    except msgspec.DecodeError:
        return None


async def listen(prefixes: CachedPrefixes, server: int, endpoints: Sequence[str]) -> None:
    """Follow a server's events until the task is cancelled. Where some are missed, what is known of it is forgotten."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    expected: dict[int | None, int] = {}  # the next number, by the server's replica
    try:
        for endpoint in endpoints:
            socket.connect(endpoint)
        while True:
            frames: list[bytes] = await socket.recv_multipart()
            try:
                batch = _BATCHES.decode(frames[-1])
            except msgspec.DecodeError as error:
                logger.warning("KV events of server %d cannot be read: %s", server, error_text(error))
                continue
            number, replica = int.from_bytes(frames[-2], "big"), batch.data_parallel_rank
            if number != expected.get(replica, number):
                prefixes.forget(server)
            expected[replica] = number + 1
            prefixes.apply(server, batch)
    finally:
        socket.close(linger=0)


class Tokens:
    """Finds out the tokens of requests, by the servers' /tokenize."""

    def __init__(self, client: aiohttp.ClientSession, fleet: Fleet) -> None:
        self._client, self._fleet = client, fleet

    async def find(self, call: Call) -> None:
        """Set the request's `tokens`, if it is a completion or a chat. They stay empty if that fails."""
        path, fields = call.target.partition("?")[0], call.fields
        if path == "/v1/completions" and "prompt" in fields:
            body = {"prompt": fields["prompt"], "add_special_tokens": fields.get("add_special_tokens", True)}
            if not bytes(fields["prompt"]).lstrip().startswith(b'"'):
                call.tokens = _ids(fields["prompt"])
                return
        elif path == "/v1/chat/completions":
            body = {name: fields[name] for name in _CHAT if name in fields}
        else:
            return
        healthy = self._fleet.healthy
        if healthy:
            backend = min(healthy, key=lambda backend: backend.in_flight)
            call.tokens = await self._tokenize(backend, msgspec.json.encode(body), call)

    async def _tokenize(self, backend: Backend, body: bytes, call: Call) -> list[int]:
        wanted = ("authorization", "x-api-key")
        headers = [("Content-Type", "application/json"), *((k, v) for k, v in call.headers if k.lower() in wanted)]
        try:
            async with asyncio.timeout(_TOKENIZE_SECONDS):
                async with self._client.post(backend.url + "/tokenize", data=body, headers=headers) as response:
                    answer: Any = await response.read()
                    return _ids(_TOKENS.decode(answer)["tokens"]) if response.status == 200 else []
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, KeyError):  # TimeoutError is an OSError
            return []


def _ids(value: msgspec.Raw) -> list[int]:
    try:
        return _IDS.decode(value)
    except msgspec.DecodeError:
        return []
