"""Compares the reads and time of sparse attention in one request's decoding step with those of dense latent attention.

    python -m benchmarks.sparse_attention [--tokens 65536] [--heads 128 16]

The shapes are DeepSeek-V3.2's, in bfloat16 on the CPU, one layer. Reads are counted from the kernels' arguments. To
verify this, all latents that are not selected are overwritten with NaN, and the result must not change. Dense attention
runs interleaved, over the same number of latents in the layout of its own kernel. Times are one thread's processor
time, which other programs hardly affect.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.cpu import CpuAttention
from quire.attention.sparse import SparseAttention

BLOCK = 16
TOP_K = 2048
INDEX_HEADS = 64
INDEX_DIM = 128
DIM = 576
VALUE_DIM = 512
SCALE = 192**-0.5


def best(steps: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the minimum processor time of each step, in milliseconds. The steps take turns."""
    times = [float("inf")] * len(steps)
    for _ in range(rounds):
        for i, step in enumerate(steps):
            started = time.thread_time()
            step()
            times[i] = min(times[i], (time.thread_time() - started) * 1e3)
    return times


def measure(heads: int, tokens: int, rounds: int) -> None:
    shape = AttentionShape(heads, 1, DIM, BLOCK, torch.bfloat16, torch.device("cpu"), VALUE_DIM)
    sparse = SparseAttention(shape, TOP_K, INDEX_DIM, CpuAttention)
    dense = CpuAttention(shape)
    blocks = tokens // BLOCK
    table = torch.randperm(blocks).int()[None]

    def memory(backend: AttentionBackend) -> torch.Tensor:
        return backend.view(torch.zeros(blocks, backend.entry_bytes(), dtype=torch.uint8), 0)

    latents = memory(sparse)
    keys = memory(sparse.of_role("indexer"))
    dense_latents = memory(dense)

    def layout(start: int, count: int) -> StepLayout:
        positions = torch.arange(start, start + count)
        slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        bounds, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [start + count]))
        return StepLayout(bounds, lengths, slots, table, tokens_per_request=count)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size).bfloat16()

    for start in range(0, tokens, 4096):  # store the whole text
        part = layout(start, 4096)
        k = draw(4096, 1, DIM)
        plan = sparse.plan(part)
        sparse.store(latents, k, None, plan)
        sparse.keys.store(keys, draw(4096, 1, INDEX_DIM), None, plan.inner)
        dense.store(dense_latents, k, None, dense.plan(part))
    q = draw(1, heads, DIM)
    index_q = draw(1, INDEX_HEADS, INDEX_DIM)
    weights = draw(1, INDEX_HEADS)
    last = layout(tokens - 1, 1)
    plan = sparse.plan(last)
    dense_plan = dense.plan(last)

    def select() -> None:
        sparse.keys.select(index_q, weights, keys, plan.selection)

    def attend() -> torch.Tensor:
        return sparse.attend(q, latents, plan, scale=SCALE)[0]

    def attend_to_all() -> torch.Tensor:
        return dense.attend(q, dense_latents, dense_plan, scale=SCALE)[0]

    times = best([select, attend, attend_to_all], rounds)
    chosen = plan.selection.slots[0].unique()
    result = attend()
    read = torch.zeros(blocks * BLOCK, dtype=torch.bool)
    read[chosen.long()] = True
    latents.view(blocks, BLOCK, DIM)[~read.view(blocks, BLOCK)] = float("nan")
    assert torch.equal(attend(), result), "a latent that was not selected has been read"
    print(
        f"{heads} heads, {tokens} tokens: {len(chosen)} latents read, {len(chosen) / tokens:.2%}; bytes: "
        f"{len(chosen) * DIM * 2:,} of latents, {tokens * INDEX_DIM * 2:,} of the indexer's keys, dense "
        f"{tokens * DIM * 2:,}; ms: {times[0]:.1f} to select, {times[1]:.1f} to attend, dense {times[2]:.1f}, "
        f"ratio {times[2] / (times[0] + times[1]):.1f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        for number in arguments.heads:
            measure(number, arguments.tokens, arguments.rounds)
