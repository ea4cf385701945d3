"""What a router knows of a prefix cache, from nothing but the bytes that vLLM's subscribers read."""

from __future__ import annotations

import msgspec
import zmq

from support.waiting import eventually

END = (-1).to_bytes(8, "big", signed=True)


class RouterView:
    """The blocks that can be found, by (group, hash), and the text that each stands for, with its salt and adapter.

    The events are read as plain lists, by the places of the fields in vLLM's structures.
    """

    def __init__(self) -> None:
        self.blocks: set[tuple[int, int]] = set()
        self.texts: dict[int, tuple[tuple[int, ...], str | None, str | None]] = {}
        self.ranks: set[int] = set()

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        self.ranks.add(rank)
        for tag, *fields in events:
            {"BlockStored": self._store, "BlockRemoved": self._remove, "AllBlocksCleared": self._clear}[tag](*fields)

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        token_ids: list[int],
        size: int,
        lora_id: None,
        medium: str,
        lora_name: str | None,
        extra: list[list[str] | None] | None,
        group: int | None,
        *_: object,
    ) -> None:
        assert (lora_id, medium) == (None, "GPU")
        assert len(token_ids) == size * len(hashes)
        assert extra is None or len(extra) == len(hashes)
        text, salt, adapter = ((), None, lora_name) if parent is None else self.texts.get(parent, (None, None, None))
        if extra is not None and extra[0] is not None:
            salt = extra[0][0]
        for index, number in enumerate(hashes):
            assert (group or 0, number) not in self.blocks, "stored twice"
            self.blocks.add((group or 0, number))
            if text is not None:  # some groups keep a block, and not the one before it
                text += tuple(token_ids[index * size : (index + 1) * size])
                assert self.texts.setdefault(number, (text, salt, adapter)) == (text, salt, adapter)

    def _remove(self, hashes: list[int], medium: str, group: int | None) -> None:
        assert medium == "GPU"
        for number in hashes:
            self.blocks.remove((group or 0, number))

    def _clear(self) -> None:
        self.blocks.clear()


class Subscriber:
    """Follows a publisher, and asks for a replay of what it has missed. forget: numbers that it loses on the way."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "", forget: frozenset[int] = frozenset()):
        self.view, self.next, self.num_replays, self._forget = RouterView(), 0, 0, forget
        self.last = -1  # the number of the last message that came, also of one that it lost
        self._context = zmq.Context()
        self._public, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._public.connect(endpoint)
        self._public.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay.connect(replay_endpoint)

    def read(self, seconds: float) -> None:
        """Read what has come, and until there is nothing for so long."""
        while self._public.poll(seconds * 1000):
            _, number, payload = self._public.recv_multipart()
            self.last = int.from_bytes(number)
            if self.last in self._forget:
                continue
            if int.from_bytes(number) > self.next:
                self.replay()
            self._take(number, payload)

    def replay_to(self, end: int) -> None:
        """Ask for replays until there is everything below number `end`."""
        eventually(lambda: (self.replay(), self.next == end)[1], lambda: f"{end}; the next one is {self.next}")

    def replay(self) -> None:
        self.num_replays += 1
        self._replay.send_multipart([b"", self.next.to_bytes(8)])
        while (answer := self._replay.recv_multipart()[1:])[0] != END:
            self._take(*answer)

    def _take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number) == self.next:
            self.view.apply(payload)
            self.next += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
