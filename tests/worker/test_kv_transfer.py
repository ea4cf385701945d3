"""Transfers of KV blocks on the threads of a rank."""

from __future__ import annotations

import threading

import torch

from quire.messages.transfers import Transfer
from quire.worker.kv_transfer import KVTransfers, MemoryStore, Rows

SECONDS = 300


class HeldStore(MemoryStore):
    """Saves when it is told to."""

    def __init__(self) -> None:
        super().__init__(4, [64], 0, None)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def save(self, rows: Rows, order: Transfer) -> list[int]:
        self.has_begun.set()
        assert self.may_go_on.wait(SECONDS)
        return super().save(rows, order)


def saving(number: int, blocks: list[int]) -> Transfer:
    return Transfer(number, 0, False, blocks, [(0, bytes([block])) for block in blocks], blocks)


def test_a_transfer_that_waits_when_the_engine_ends_fails_and_is_no_exception():
    store = HeldStore()
    blocks = torch.randint(1, 256, (4, 64), dtype=torch.uint8)
    transfers = KVTransfers(blocks, [store])
    running, waiting = transfers.submit(saving(0, [1, 2])), transfers.submit(saving(1, [0, 3]))
    assert store.has_begun.wait(SECONDS)
    transfers.close()
    store.may_go_on.set()
    assert running.result(SECONDS) == []
    assert waiting.result(SECONDS) == [0, 1]
    assert torch.equal(store.slots[1:3], blocks[1:3])
    assert not store.slots[[0, 3]].any()
