"""Paged attention on the CPU against torch's own on contiguous tensors, at the shape of Qwen3-0.6B in bfloat16.

    python benchmarks/attention_cpu.py [--threads 2] [--latent]

--latent: at that of DeepSeek-V2-Lite, whose cache is latent, against plain matrix products. Prints the milliseconds of
a whole step, all 28 layers, for decode and for prefill chunks of 512 tokens. Each layer has its own cache, blocks
scattered over it, so that nothing stays in the processor's caches that would not in an engine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, StepLayout
from quire.attention.cpu import CpuAttention

LAYERS, BLOCK, SCALE = 28, 16, 0.1
CPU = torch.device("cpu")
QWEN = AttentionShape(16, 8, 128, BLOCK, torch.bfloat16, CPU)
DEEPSEEK = AttentionShape(16, 1, 576, BLOCK, torch.bfloat16, CPU, value_dim=512)


def milliseconds(step: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The median and the best of so many rounds."""
    step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[rounds // 2], min(times)


def paged(shape: AttentionShape, requests: int, length: int, new: int, rounds: int) -> tuple[float, float]:
    """`requests` of `length` tokens, of which the last `new` are this step's."""
    backend = CpuAttention(shape)
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
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.randn(requests * new, h, shape.head_dim).bfloat16() for h in heads)

    def step() -> None:
        plan = backend.plan(layout)
        for cache in caches:
            backend.store(cache, k, v if shape.value_dim is None else None, plan)
            backend.attend(q, cache, plan, scale=SCALE)

    return milliseconds(step, rounds)


def contiguous(shape: AttentionShape, requests: int, length: int, new: int, rounds: int) -> tuple[float, float]:
    """The same by scaled_dot_product_attention over keys and values that lie in order; nothing is stored."""

    def tensors(heads: int, tokens: int) -> Tensor:
        return torch.randn(requests, heads, tokens, shape.head_dim, dtype=torch.bfloat16)

    q, keys = tensors(shape.num_heads, new), [tensors(shape.num_kv_heads, length) for _ in range(LAYERS)]
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new) if 1 < new < length else None

    def step() -> None:
        for k, v in zip(keys, values, strict=True):
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=new == length, scale=SCALE, enable_gqa=True
            )

    def latent_step() -> None:  # scaled_dot_product_attention is far slower here, having no kernel for such values
        for k in keys:
            scores = (q.flatten(1, 2) @ k[:, 0].transpose(1, 2)).mul_(SCALE).unflatten(1, (-1, new))
            if new > 1:
                scores.masked_fill_(hidden, -torch.inf)
            scores.softmax(-1).flatten(1, 2) @ k[:, 0, :, : shape.value_dim]

    if shape.value_dim is None:
        values = [torch.randn_like(k) for k in keys]
        return milliseconds(step, rounds)
    hidden = ~torch.ones(new, length, dtype=torch.bool).tril(length - new)
    return milliseconds(latent_step, rounds)


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
    for requests, length, new in cases:
        rounds = options.rounds if new == 1 else 5
        ours, best = paged(shape, requests, length, new, rounds)
        torchs, torch_best = contiguous(shape, requests, length, new, 3)
        kv = LAYERS * requests * length * CpuAttention(shape).block_bytes() / BLOCK / 1e9
        pairs = LAYERS * requests * shape.num_heads * sum(range(length - new + 1, length + 1))
        flops = 2 * pairs * (shape.head_dim + shape.out_dim) / 1e9
        rate = f"{kv / best * 1e3:5.1f} GB/s of KV" if new == 1 else f"{flops / best * 1e3:5.0f} GFLOP/s"
        what = f"{requests:2} x {new} new of {length}"
        print(f"{what:20} {ours:7.1f} ({best:.1f})  {rate};  torch {torchs:7.1f} ({torch_best:.1f})", flush=True)


if __name__ == "__main__":
    main()
