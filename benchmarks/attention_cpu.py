"""Paged attention on the CPU against torch's own on contiguous tensors, at the shape of Qwen3-0.6B in bfloat16.

    python benchmarks/attention_cpu.py [--threads 2]

Prints the milliseconds of a whole step, all 28 layers, for decode and for prefill chunks of 512 tokens. Each layer has
its own cache, blocks scattered over it, so that nothing stays in the processor's caches that would not in an engine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, StepLayout
from quire.attention.cpu import CpuAttention

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 28, 16, 8, 128, 16
SCALE = DIM**-0.5


def milliseconds(step: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The median and the best of so many rounds."""
    step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[rounds // 2], min(times)


def paged(requests: int, length: int, new: int, rounds: int) -> tuple[float, float]:
    """`requests` of `length` tokens, of which the last `new` are this step's."""
    backend = CpuAttention(AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, torch.bfloat16, torch.device("cpu")))
    blocks = -(-length // BLOCK)
    table = torch.randperm(requests * blocks).int().view(requests, blocks)
    caches = [backend.allocate(requests * blocks) for _ in range(LAYERS)]
    for cache in caches:
        cache.normal_()
    positions = torch.arange(length - new, length)
    layout = StepLayout(
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * new,
        seq_lens=torch.full((requests,), length, dtype=torch.int32),
        slot_mapping=(table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK).flatten(),
        block_table=table,
    )
    q, k, v = (torch.randn(requests * new, h, DIM).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))

    def step() -> None:
        plan = backend.plan(layout)
        for cache in caches:
            backend.store(cache, k, v, plan)
            backend.attend(q, cache, plan, scale=SCALE)

    return milliseconds(step, rounds)


def contiguous(requests: int, length: int, new: int, rounds: int) -> tuple[float, float]:
    """The same by scaled_dot_product_attention over keys and values that lie in order; nothing is stored."""

    def tensors(heads: int, tokens: int) -> Tensor:
        return torch.randn(requests, heads, tokens, DIM, dtype=torch.bfloat16)

    q, caches = tensors(HEADS, new), [(tensors(KV_HEADS, length), tensors(KV_HEADS, length)) for _ in range(LAYERS)]
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new) if 1 < new < length else None

    def step() -> None:
        for k, v in caches:
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=new == length, scale=SCALE, enable_gqa=True
            )

    return milliseconds(step, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads; milliseconds for {LAYERS} layers: median (best)")
    cases = [(16, 192, 1), (1, 192, 1), (1, 4096, 1), (16, 1024, 1), (1, 512, 512), (1, 1024, 512), (1, 2048, 512)]
    for requests, length, new in cases:
        rounds = options.rounds if new == 1 else 5
        (ours, best), (torchs, torch_best) = paged(requests, length, new, rounds), contiguous(requests, length, new, 3)
        kv = 2 * LAYERS * requests * length * KV_HEADS * DIM * 2 / 1e9
        flops = 4 * LAYERS * requests * HEADS * DIM * sum(range(length - new + 1, length + 1)) / 1e9
        rate = f"{kv / best * 1e3:5.1f} GB/s of KV" if new == 1 else f"{flops / best * 1e3:5.0f} GFLOP/s"
        what = f"{requests:2} x {new} new of {length}"
        print(f"{what:20} {ours:7.1f} ({best:.1f})  {rate};  torch {torchs:7.1f} ({torch_best:.1f})", flush=True)


if __name__ == "__main__":
    main()
