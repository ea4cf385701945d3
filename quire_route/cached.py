"""Which servers have which prefixes in their caches, as their KV events say (docs/kv-events.md, vLLM's format)."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from quire.engine.router import Prefixes
from quire.messages.errors import error_text
from quire.messages.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEventBatch
from quire.metrics.logging import logger
from quire_route.call import Call
from quire_route.fleet import Backend, Fleet

_TOKENIZE_SECONDS = 1.0  # a request does not wait longer to know its tokens
_CHAT = """messages tools documents chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens model""".split()
_BATCHES = msgspec.msgpack.Decoder(KVEventBatch)
_TOKENS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IDS = msgspec.json.Decoder(list[int])


class CachedPrefixes(Prefixes):
    """A server has the blocks that its events say. A piece is a block of tokens.

    Only the events of KV group 0 count, which keeps the most tokens. What a server has is unknown until it has told.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.block_size = 0  # unknown before the first event
        self._adapters: set[str] = set()
        self._pieces: list[dict[BlockHash, int]] = [{} for _ in range(count)]  # by each server's own hashes

    def apply(self, server: int, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.forget(server)
            elif event.group_idx not in (None, 0):
                continue
            elif isinstance(event, BlockRemoved):
                self._remove(server, event)
            elif event.block_size > 0:
                self._store(server, event)

    def _store(self, server: int, event: BlockStored) -> None:
        known, size = self._pieces[server], event.block_size
        self.block_size = self.block_size or size
        if event.parent_block_hash is None:
            extra = event.extra_keys[0] if event.extra_keys else None
            piece: int | None = _root(extra[0] if extra else None, event.lora_name)
            self._adapters.update([] if event.lora_name is None else [event.lora_name])
        else:
            piece = known.get(event.parent_block_hash)
        if piece is None or size != self.block_size:
            return  # what is before it was stored before the proxy listened, or other servers have other blocks
        for index, name in enumerate(event.block_hashes):
            piece = hash((piece, *event.token_ids[index * size : (index + 1) * size]))
            known[name] = piece
            self._cores[piece] = self._cores.get(piece, 0) | 1 << server

    def _remove(self, server: int, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            if (piece := self._pieces[server].pop(name, None)) is not None:
                self._lose(server, piece)

    def _lose(self, server: int, piece: int) -> None:
        left = self._cores.get(piece, 0) & ~(1 << server)
        if left:
            self._cores[piece] = left
        else:
            self._cores.pop(piece, None)

    # ---- what a Router asks

    def pieces(self, call: Call) -> list[int]:
        """The hash of each full block of the request's tokens, as far as some server has it."""
        if not call.tokens or not self.block_size:
            return []
        salt, model = (_text(call, name) for name in ("cache_salt", "model"))
        piece, size, found = _root(salt, model if model in self._adapters else None), self.block_size, []
        for start in range(0, len(call.tokens) - size + 1, size):
            piece = hash((piece, *call.tokens[start : start + size]))
            if piece not in self._cores:
                break
            found.append(piece)
        return found

    def add(self, pieces: Sequence[int], core: int) -> None:
        """Only events say what a server has."""

    def forget(self, server: int) -> None:
        for piece in self._pieces[server].values():
            self._lose(server, piece)
        self._pieces[server] = {}


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
                _, sent, data = frames
                batch = _BATCHES.decode(data)
            except ValueError as error:  # msgspec.DecodeError is one, too
                logger.warning("KV events of server %d cannot be read: %s", server, error_text(error))
                continue
            number, replica = int.from_bytes(sent, "big"), batch.data_parallel_rank
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
