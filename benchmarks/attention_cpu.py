"""Compares paged CPU attention with torch's attention on contiguous tensors, with Qwen3-0.6B's shapes in bfloat16.

    python benchmarks/attention_cpu.py [--threads 2] [--latent]

--latent: with DeepSeek-V2-Lite's shapes and latent cache, compared with plain matrix products. Prints the milliseconds
of a whole step (all 28 layers) for decoding and for prefill chunks of 512 tokens, with bfloat16, int8 and fp8 caches.
Each layer has its own cache with scattered blocks, so the processor's caches contain as little of it as in an engine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, StepLayout
from quire.attention.cells import CELLS
from quire.attention.cpu import CpuAttention
from quire.ops.memory import empty

LAYERS = 28
BLOCK = 16
SCALE = 0.1
CPU = torch.device("cpu")
QWEN = AttentionShape(16, 8, 128, BLOCK, torch.bfloat16, CPU)
DEEPSEEK = AttentionShape(16, 1, 576, BLOCK, torch.bfloat16, CPU, value_dim=512)


def milliseconds(steps: list[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """Return the median and the best of `rounds` rounds, each of which runs every step once."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, mine in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            mine.append((time.perf_counter() - start) * 1e3)
    return [(sorted(mine[1:])[rounds // 2], min(mine)) for mine in times]


def paged(shape: AttentionShape, requests: int, length: int, new: int) -> Callable[[], None]:
    """Return a step of `requests` requests with `length` tokens each. It computes the last `new` tokens of each."""
    backend = CpuAttention(shape)
    blocks = -(-length // BLOCK)
    table = torch.randperm(requests * blocks).int().view(requests, blocks)
    memory = empty(requests * blocks, LAYERS * backend.entry_bytes(), dtype=torch.uint8, device=shape.device)
    caches = [backend.view(memory, layer) for layer in range(LAYERS)]

    def layout(new: int) -> StepLayout:
        positions = torch.arange(length - new, length)
        return StepLayout(
            query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * new,
            seq_lens=torch.full((requests,), length, dtype=torch.int32),
            slot_mapping=(table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK).flatten(),
            block_table=table,
        )

    def tokens(heads: int, new: int) -> Tensor:
        return torch.randn(requests * new, heads, shape.head_dim).bfloat16()

    def keys_and_values(new: int) -> tuple[Tensor, Tensor | None]:
        k = tokens(shape.num_kv_heads, new)
        return k, torch.randn_like(k) if shape.value_dim is None else None

    def step() -> None:
        plan = backend.plan(this_step)
        for cache in caches:
            backend.store(cache, k, v, plan)
            backend.attend(q, cache, plan, scale=SCALE)

    k, v = keys_and_values(length)
    for cache in caches:
        backend.store(cache, k, v, backend.plan(layout(length)))
    this_step, q, (k, v) = layout(new), tokens(shape.num_heads, new), keys_and_values(new)
    return step


def contiguous(shape: AttentionShape, requests: int, length: int, new: int) -> Callable[[], None]:
    """Return the same step with scaled_dot_product_attention over contiguous keys and values; it stores nothing."""

    def tensors(heads: int, tokens: int) -> Tensor:
        return torch.randn(requests, heads, tokens, shape.head_dim, dtype=torch.bfloat16)

    q = tensors(shape.num_heads, new)
    keys = [tensors(shape.num_kv_heads, length) for _ in range(LAYERS)]
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new) if 1 < new < length else None

    def step() -> None:
        for k, v in zip(keys, values, strict=True):
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=new == length, scale=SCALE, enable_gqa=True
            )

    def latent_step() -> None:  # scaled_dot_product_attention has no kernel for such values
        for k in keys:
            scores = (q.flatten(1, 2) @ k[:, 0].transpose(1, 2)).mul_(SCALE).unflatten(1, (-1, new))
            if new > 1:
                scores.masked_fill_(hidden, -torch.inf)
            scores.softmax(-1).flatten(1, 2) @ k[:, 0, :, : shape.value_dim]

    if shape.value_dim is None:
        values = [torch.randn_like(k) for k in keys]
        return step
    hidden = ~torch.ones(new, length, dtype=torch.bool).tril(length - new)
    return latent_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--latent", action="store_true")
    options = parser.parse_args()
    shape = DEEPSEEK if options.latent else QWEN
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads; milliseconds for {LAYERS} layers: median (best)")
    cases = [(16, 192, 1), (1, 192, 1), (1, 4096, 1), (16, 1024, 1), (1, 512, 512), (1, 1024, 512), (1, 2048, 512)]
    kinds = [shape, *(replace(shape, cell=cell) for cell in CELLS.values())]
    for requests, length, new in cases:
        rounds = options.rounds if new == 1 else 5
        ours = milliseconds([paged(kind, requests, length, new) for kind in kinds], rounds)
        torchs = milliseconds([contiguous(shape, requests, length, new)], 3)
        best = ours[0][1]
        kv = LAYERS * requests * length * CpuAttention(shape).entry_bytes() / BLOCK / 1e9
        pairs = LAYERS * requests * shape.num_heads * sum(range(length - new + 1, length + 1))
        flops = 2 * pairs * (shape.head_dim + shape.out_dim) / 1e9
        rate = f"{kv / best * 1e3:5.1f} GB/s of KV" if new == 1 else f"{flops / best * 1e3:5.0f} GFLOP/s"
        columns = [f"{median:7.1f} ({best:.1f})" for median, best in ours + torchs]
        what = f"{requests:2} x {new} new of {length}"
        print("{:20}{}  {};  int8 {}  fp8 {}  torch {}".format(what, columns[0], rate, *columns[1:]), flush=True)


if __name__ == "__main__":
    main()
