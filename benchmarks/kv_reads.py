"""How fast one rank reads KV blocks of another, in another process of this machine.

    python -m benchmarks.kv_reads

Blocks have the size of Qwen3-0.6B's. The other engine has one rank or two, whose halves are put together.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import support.kv_peers as kv_peers
from quire.messages.transfers import Peer, Transfer
from quire.transfer.store import PeerStore
from quire.worker.kv_transfer import Rows

MODEL = kv_peers.ModelModel(layers=28, heads=16, kv_heads=8, head_dim=128, block_size=16)
NUM_BLOCKS = 200


def serve(ranks: int, shared: bool) -> None:
    kv_peers.fill = lambda blocks, *_: blocks.fill(7)
    producer = kv_peers.Producer(MODEL.layouts(ranks, 1), NUM_BLOCKS, shared=shared)
    print(*producer.peer.ports, flush=True)
    sys.stdin.read()


def measure(ranks: int, transport: str, streams: int) -> None:
    shared = transport == "shared_memory"
    command = [sys.executable, "-m", "benchmarks.kv_reads", str(ranks), str(int(shared))]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        peer = Peer(kv_peers.NAME, "127.0.0.1", tuple(map(int, other.stdout.readline().split())))
        layout = MODEL.layout(0, 1, 0, 1)
        rows = Rows.of(torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8))
        store = PeerStore(layout, 0, kv_peers.SECRET, transports=[transport], streams=streams)

        def seconds(block_ids: list[int], times: int) -> float:
            order = Transfer(1, 0, True, block_ids, [(0, b"")] * len(block_ids), block_ids, peer)
            best = float("inf")
            for _ in range(times):
                started = time.perf_counter()
                assert store.load(rows, order) == []
                best = min(best, time.perf_counter() - started)
            return best

        rate = (NUM_BLOCKS - 1) * layout.block_bytes / seconds(list(range(1, NUM_BLOCKS)), 7) / 1e9
        single = seconds([1], 100) * 1e6
        print(
            f"{ranks} ranks -> 1, {transport}, {streams} streams: {rate:5.2f} GB/s; one block of "
            f"{layout.block_bytes >> 10} KiB in {single:.0f} us",
            flush=True,
        )
        store.close()
        other.communicate("")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), sys.argv[2] == "1")
    else:
        for ranks in (1, 2):
            for streams in (1, 2, 4):
                measure(ranks, "tcp", streams)
            measure(ranks, "shared_memory", 1)
