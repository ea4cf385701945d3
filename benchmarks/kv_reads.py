"""Measures how fast one rank reads KV blocks of another process on this machine.

    python -m benchmarks.kv_reads

Blocks have the size of Qwen3-0.6B's. The other engine has one or two ranks, whose halves are combined.
"""

from __future__ import annotations

import os
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


def used(process: int) -> float:
    """Return the process's processor time in seconds."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(ranks: int, transport: str, streams: int) -> None:
    shared = transport == "shared_memory"
    command = [sys.executable, "-m", "benchmarks.kv_reads", str(ranks), str(int(shared))]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        peer = Peer(kv_peers.NAME, "127.0.0.1", tuple(map(int, other.stdout.readline().split())))
        layout = MODEL.layout(0, 1, 0, 1)
        rows = Rows.of(torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8))
        store = PeerStore(layout, 0, kv_peers.SECRET, transports=[transport], streams=streams)

        def seconds(block_ids: list[int], times: int) -> tuple[float, float, float]:
            """Return the minimum time of a load: wall time, and the processor times of this process and of the other
            one."""
            order = Transfer(1, 0, True, block_ids, [(0, b"")] * len(block_ids), block_ids, peer)
            best = (float("inf"),) * 3
            for _ in range(times):
                started = time.perf_counter(), time.process_time(), used(other.pid)
                assert store.load(rows, order) == []
                ended = time.perf_counter(), time.process_time(), used(other.pid)
                best = tuple(min(b, e - s) for b, e, s in zip(best, ended, started, strict=True))  # type: ignore[assignment]
            return best

        gigabytes = (NUM_BLOCKS - 1) * layout.block_bytes / 1e9
        clock, own, others = seconds(list(range(1, NUM_BLOCKS)), 9)
        single, *_ = seconds([1], 100)
        print(
            f"{ranks} ranks -> 1, {transport}, {streams} streams: {gigabytes / clock:5.2f} GB/s; processor time of a "
            f"GB: {own / gigabytes:.2f} s here, {others / gigabytes:.2f} s there; one block of "
            f"{layout.block_bytes >> 10} KiB in {single * 1e6:.0f} us",
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
