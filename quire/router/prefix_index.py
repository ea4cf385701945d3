"""Tracks which servers have cached which prefixes, from their KV events (docs/kv-events.md, vLLM's format)."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
import yarl
import zmq
import zmq.asyncio

from quire.engine.router import Prefixes
from quire.messages.errors import error_text
from quire.messages.kv_events import END_OF_REPLAY, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEventBatch
from quire.observability.logging import logger
from quire.router.call import Call
from quire.router.client import request
from quire.router.fleet import Backend, Fleet
from quire.router.headers import CONTEXT

_TOKENIZE_SECONDS = 1.0  # the longest time that a request waits for its tokens
_REPLAY_SECONDS = 5.0  # between two messages
_CHAT = """messages tools documents chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens model""".split()
_BATCHES = msgspec.msgpack.Decoder(KVEventBatch)
_TOKENS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IDS = msgspec.json.Decoder(list[int])


class CachedPrefixes(Prefixes):
    """The cached blocks of each server, from its events. A piece is a block of tokens.

    Only the events of KV group 0 are used, since it keeps the most tokens. A server's cache is unknown before its first
    event. Each of a server's replicas has a stream of events, and blocks of its own.
    """

    def __init__(self, servers: Sequence[int]) -> None:
        """servers: the server number of each stream."""
        super().__init__()
        self.servers = servers
        self.last: list[tuple[int, bytes] | None] = [None] * len(servers)  # each stream's last batch, with its number
        self.block_size = 0  # unknown before the first event
        self._adapters: set[str] = set()
        self._pieces: list[dict[BlockHash, int]] = [{} for _ in servers]  # for each stream, by its own hashes

    def next(self, stream: int) -> int:
        """Return the number of the next expected batch."""
        last = self.last[stream]
        return last[0] + 1 if last else 0

    def take(self, stream: int, number: int, data: bytes) -> None:
        """Apply a batch, unless it was applied before. If it is invalid or earlier batches are missing, drop everything
        known from the stream."""
        if number < self.next(stream):
            return
        if number > self.next(stream):
            self.forget_stream(stream)
        self.last[stream] = number, data
        try:
            self.apply(stream, _BATCHES.decode(data))
        except ValueError as error:  # msgspec.DecodeError is one, too
            _warn_unreadable(self.servers[stream], error)
            self._clear(stream)

    def apply(self, stream: int, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(stream)
            elif event.group_idx not in (None, 0):
                continue
            elif isinstance(event, BlockRemoved):
                self._remove(stream, event)
            elif event.block_size > 0:
                self._store(stream, event)

    def _store(self, stream: int, event: BlockStored) -> None:
        known = self._pieces[stream]
        size = event.block_size
        self.block_size = self.block_size or size
        if event.parent_block_hash is None:
            extra = event.extra_keys[0] if event.extra_keys else None
            piece: int | None = _root(extra[0] if extra else None, event.lora_name)
            self._adapters.update([] if event.lora_name is None else [event.lora_name])
        else:
            piece = known.get(event.parent_block_hash)
        if piece is None or size != self.block_size:
            return  # its parent was stored before the proxy listened, or is another server's
        for index, name in enumerate(event.block_hashes):
            piece = hash((piece, *event.token_ids[index * size : (index + 1) * size]))
            known[name] = piece
            self._cores[piece] = self._cores.get(piece, 0) | 1 << stream

    def _remove(self, stream: int, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            if (piece := self._pieces[stream].pop(name, None)) is not None:
                self._lose(stream, piece)

    def _lose(self, stream: int, piece: int) -> None:
        left = self._cores.get(piece, 0) & ~(1 << stream)
        if left:
            self._cores[piece] = left
        else:
            self._cores.pop(piece, None)

    def _clear(self, stream: int) -> None:
        for piece in self._pieces[stream].values():
            self._lose(stream, piece)
        self._pieces[stream] = {}

    def forget_stream(self, stream: int) -> None:
        """Drop everything known from a stream, as before the first batch."""
        self._clear(stream)
        self.last[stream] = None

    # ---- the interface for Router

    def pieces(self, call: Call) -> list[int]:
        """Return the hash of each full block of the request's tokens, up to the first block that no server has."""
        if not call.tokens or not self.block_size:
            return []
        salt, model = (_text(call, name) for name in ("cache_salt", "model"))
        piece = _root(salt, model if model in self._adapters else None)
        size = self.block_size
        found = []
        for start in range(0, len(call.tokens) - size + 1, size):
            piece = hash((piece, *call.tokens[start : start + size]))
            if piece not in self._cores:
                break
            found.append(piece)
        return found

    def add(self, pieces: Sequence[int], core: int) -> None:
        """Do nothing, since only events determine what a server has."""

    def longest(self, pieces: Sequence[int], ready: list[int]) -> list[int]:
        streams = super().longest(pieces, [stream for stream, server in enumerate(self.servers) if server in ready])
        found = {self.servers[stream] for stream in streams}
        return [server for server in ready if server in found]

    def forget(self, core: int) -> None:
        for stream, server in enumerate(self.servers):
            if server == core:
                self.forget_stream(stream)


def _root(salt: str | None, adapter: str | None) -> int:
    return hash((salt, adapter))


def _text(call: Call, name: str) -> str | None:
    """Return a text field of the body."""
    try:
        return msgspec.json.decode(call.fields[name], type=str) if name in call.fields else None
    except msgspec.DecodeError:
        return None


async def listen(prefixes: CachedPrefixes, stream: int, endpoint: str, replay: str | None = None) -> None:
    """Follow a stream of events until the task is cancelled. replay: the address that replays missed batches."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    connections = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    poller = zmq.asyncio.Poller()
    poller.register(connections, zmq.POLLIN)
    poller.register(socket, zmq.POLLIN)
    latest = -1  # the last received number
    try:
        socket.connect(endpoint)
        while True:
            if connections in dict(await poller.poll()):
                await connections.recv_multipart()
                if replay is not None:
                    await _catch_up(prefixes, stream, replay)
                continue
            try:
                number, data = _numbered(await socket.recv_multipart())
            except ValueError as error:
                _warn_unreadable(prefixes.servers[stream], error)
                continue
            if number > prefixes.next(stream) or number <= latest:  # some were missed, or a new core starts at 0
                await _catch_up(prefixes, stream, replay)
            latest = number
            prefixes.take(stream, number, data)
    finally:
        connections.close(linger=0)
        socket.close(linger=0)


async def _catch_up(prefixes: CachedPrefixes, stream: int, replay: str | None) -> None:
    """Apply missed batches. If they are not available, drop everything known from the stream."""
    batches = []
    last = prefixes.last[stream]
    try:
        if replay is not None:
            # The last known batch is requested, too: only the same core has an identical one, with the same time.
            batches = await _replayed(replay, last[0] if last else 0)
            first = batches[0] if batches else (-1, b"")
            if last and first != last and first[0] != last[0] + 1:
                prefixes.forget_stream(stream)
                batches = await _replayed(replay, 0)
    except (ValueError, OSError, zmq.ZMQError) as error:  # TimeoutError is an OSError
        logger.warning(
            "KV events of server %d cannot be replayed from %s: %s", prefixes.servers[stream], replay, error_text(error)
        )
        batches = []
    if not batches:
        prefixes.forget_stream(stream)
    for number, data in batches:
        prefixes.take(stream, number, data)
        await asyncio.sleep(0)  # let requests run in between


async def _replayed(endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """Return the batches from number `first` on that the server still has. Raises ValueError, OSError or ZMQError."""
    batches: list[tuple[int, bytes]] = []
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvhwm = 0, 0  # without a limit here, the server does not have to drop messages
        socket.connect(endpoint)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            async with asyncio.timeout(_REPLAY_SECONDS):
                frames: list[bytes] = await socket.recv_multipart()
            await asyncio.sleep(0)  # let requests run, since receiving queued messages does not yield by itself
            if frames[1:2] == [END_OF_REPLAY]:
                return batches
            batches.append(_numbered(frames))


def _numbered(frames: list[bytes]) -> tuple[int, bytes]:
    """Return the number and the batch of a message. Raises ValueError for an invalid message."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ValueError(f"a message of {len(frames)} frames is not a topic, a number of 8 bytes and a batch")
    return int.from_bytes(frames[1], "big"), frames[2]


def _warn_unreadable(server: int, error: ValueError) -> None:
    logger.warning("KV events of server %d cannot be read: %s", server, error_text(error))


class Tokens:
    """Tokenizes requests with the servers' /tokenize."""

    def __init__(self, client: aiohttp.ClientSession, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet

    async def find(self, call: Call) -> None:
        """Set the request's `tokens`, if it is a completion or a chat. They stay empty if that fails."""
        path = call.target.partition("?")[0]
        fields = call.fields
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
        wanted = ("authorization", "x-api-key", *CONTEXT)
        headers = [("Content-Type", "application/json"), *((k, v) for k, v in call.headers if k.lower() in wanted)]
        try:
            async with asyncio.timeout(_TOKENIZE_SECONDS):
                url = yarl.URL(backend.url + "/tokenize", encoded=True)
                async with request(self._client, call.span, "POST", url, headers, body) as response:
                    answer: Any = await response.read()
                    return _ids(_TOKENS.decode(answer)["tokens"]) if response.status == 200 else []
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, KeyError):  # TimeoutError is an OSError
            return []


def _ids(value: msgspec.Raw) -> list[int]:
    try:
        return _IDS.decode(value)
    except msgspec.DecodeError:
        return []
