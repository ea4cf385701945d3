"""Publishes prefix-cache events over ZeroMQ in vLLM's format, so that routers can use them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from quire.config.engine import ConfigError
from quire.config.kv_events import KVEventOptions, of_rank
from quire.kv.block_pool import HashedTokens
from quire.kv.specs import ChunkedSpec, KVCacheSpec, LatentSpec, SlidingWindowSpec, StateSpec
from quire.messages.errors import error_text
from quire.messages.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from quire.observability.logging import logger

MEDIUM = "GPU"
_END = b""  # tells the publishing thread to end


def _short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class KVEvents:
    """A BlockListener that collects events, and sends them when `publish` is called, once per step.

    If a model has only one KV group, its events do not name the group. With several, each group has its own events,
    with its number, kind and window. Group 0 stores the most tokens: the cached prefix of a prompt is at most as long
    as its prefix in group 0.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        block_size: int,
        send: Callable[[list[KVCacheEvent]], None],
        close: Callable[[], None],
    ) -> None:
        self.close = close
        self._send = send
        self._block_size = block_size
        self._groups = [(group, _kind(spec), getattr(spec, "window", None)) for group, spec in enumerate(specs)]
        self._only_group = len(specs) == 1
        # Subscribers of a lost core must forget its blocks.
        self._events: list[KVCacheEvent] = [AllBlocksCleared()]

    def on_stored(self, group: int, tokens: HashedTokens, index: int, block_id: int) -> None:
        hashes = tokens.block_hashes
        size = self._block_size
        last = self._events[-1] if self._events else None
        number = _short(hashes[index])
        token_ids = tokens.token_ids[index * size : (index + 1) * size]
        parent = _short(hashes[index - 1]) if index else None
        names = (None, None, None) if self._only_group else self._groups[group]
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent and last.group_idx == names[0]:
            last.block_hashes.append(number)
            last.token_ids += token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        salt = tokens.source.cache_salt
        adapter = tokens.source.adapter
        extra: list[tuple[str, ...] | None] | None = None if salt is None or index else [(salt,)]
        self._events.append(
            BlockStored(
                [number],
                parent,
                token_ids,
                size,
                None,
                MEDIUM,
                None if adapter is None else adapter.name,
                extra,
                *names,
            )
        )

    def on_removed(self, group: int, block_hash: bytes, block_id: int) -> None:
        last = self._events[-1] if self._events else None
        number = None if self._only_group else group
        if isinstance(last, BlockRemoved) and last.group_idx == number:
            last.block_hashes.append(_short(block_hash))
        else:
            self._events.append(BlockRemoved([_short(block_hash)], MEDIUM, number))

    def on_cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def publish(self) -> None:
        if self._events:
            self._send(self._events)
            self._events = []


def _kind(spec: KVCacheSpec) -> str:
    """Return vLLM's name for the kind of a group."""
    if isinstance(spec, SlidingWindowSpec):
        return "sliding_window"
    if isinstance(spec, ChunkedSpec):
        return "chunked_local_attention"
    if isinstance(spec, StateSpec):
        return "mamba"
    return "mla_attention" if isinstance(spec, LatentSpec) else "full_attention"


class KVEventPublisher:
    """Sends batches from a thread. A message consists of topic, sequence number (8 bytes, big endian) and batch.

    It never waits for a subscriber. A subscriber that is slow or late misses numbers and can request a replay by
    sending the first number that it lacks. Each reply is a number and a batch; the last one is END_OF_REPLAY with an
    empty batch. The number of a batch that was dropped before it was sent (see max_queue_size) is not reused, so
    subscribers notice the gap. Raises ConfigError if an address cannot be used.
    """

    def __init__(self, options: KVEventOptions, rank: int) -> None:
        self._rank, self._topic, self._next = rank, options.topic.encode(), 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_full = False
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=options.buffer_steps)
        self._context = context = zmq.Context()
        self._outbox, self._inbox = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._public, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._outbox.set_hwm(options.max_queue_size)
        self._inbox.set_hwm(1)  # the high-water marks of both ends add up
        self._public.set_hwm(options.hwm)
        self._replay.set_hwm(options.buffer_steps + 1)
        self._inbox.bind("inproc://batches")
        self._outbox.connect("inproc://batches")
        try:
            address = of_rank(options.endpoint, rank)
            (self._public.bind if options.binds() else self._public.connect)(address)
            if options.replay_endpoint is not None:
                address = of_rank(options.replay_endpoint, rank)
                self._replay.bind(address)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: {address} cannot be used: {error_text(error)}") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def send(self, events: list[KVCacheEvent]) -> None:
        payload = self._encode(KVEventBatch(time.time(), events, self._rank))
        number = self._next.to_bytes(8, "big")
        self._next = self._next + 1
        try:
            self._outbox.send_multipart([number, payload], zmq.NOBLOCK)
        except zmq.Again:
            if not self._is_full:
                logger.warning("KV events are lost, since %d batches wait (max_queue_size)", self._outbox.get_hwm())
            self._is_full = True

    def close(self) -> None:
        self._outbox.send(_END)
        self._thread.join()
        self._context.destroy(linger=1000)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inbox in ready:
                number, *rest = self._inbox.recv_multipart()
                if not rest:
                    return
                self._buffer.append((number, rest[0]))
                self._public.send_multipart([self._topic, number, rest[0]])
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())

    def _answer(self, request: list[bytes]) -> None:
        """Answer a replay request. request: the client's address, an empty frame, and the first number."""
        client, *frames = request
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            logger.warning("A request for a replay of KV events has no meaning")
            return
        for number, payload in self._buffer:
            if number >= frames[1]:  # big endian, so they compare like integers
                self._replay.send_multipart([client, b"", number, payload])
        self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])
