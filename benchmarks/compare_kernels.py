"""Compares the CPU kernels of two source trees, to measure the effect of a change.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_kernels.py /tmp/before . [--threads 2] [--rounds 15] [--only decode] [--cpu-isa avx2]

A tree may also be an unpacked wheel, whose kernels were built by another compiler. Each tree runs in its own process,
and the two alternate, so that both see the same noise. Prints the best milliseconds of each, the ratio of these, and
the median of the rounds' ratios (after / before). About four minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

Step = Callable[[], object]
BLOCK = 16
LEAST_SECONDS = 0.01
LARGEST_CACHE = 1.5e9


def attention_cases() -> dict[str, Callable[[], Step]]:
    """Attention of Qwen3-0.6B (16 heads, 8 KV heads of 128), with 8-bit caches and with a window, and of
    DeepSeek-V2-Lite.
    """
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        " int8": {"cell": "int8"},
        " fp8": {"cell": "fp8"},
        " window 1000": {"window": 1000},
        " latent": {"heads": (16, 1), "dim": 576, "value_dim": 512},
    }
    cases: dict[str, Callable[[], Step]] = {}
    for kind, options in kinds.items():
        for requests in (1, 16, 64):
            for length in (128, 1024, 8192, 32768):
                if requests * length <= 2**18 and (not kind or length in (1024, 32768)):
                    cases[f"decode {requests:2} x {length}{kind}"] = lambda r=requests, n=length, o=options: attention(
                        r, n, 1, **o
                    )
        for length, new in ((512, 512), (4096, 4096), (4096, 512)):
            if not kind or new == 512:
                cases[f"prompt {new} of {length}{kind}"] = lambda n=length, new=new, o=options: attention(
                    1, n, new, **o
                )
    return cases


def attention(
    requests: int,
    length: int,
    new: int,
    heads: tuple[int, int] = (16, 8),
    dim: int = 128,
    cell: str | None = None,
    window: int | None = None,
    value_dim: int | None = None,
) -> Step:
    import torch

    from quire.attention.base import AttentionShape, StepLayout
    from quire.attention.cells import CELLS
    from quire.attention.cpu import CpuAttention

    cells = None if cell is None else CELLS[cell]
    shape = AttentionShape(*heads, dim, BLOCK, torch.bfloat16, torch.device("cpu"), value_dim, cells)
    backend = CpuAttention(shape)
    blocks = -(-length // BLOCK)
    table = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0)).int().view(requests, blocks)
    caches = caches_of(backend, requests * blocks)

    def layout(start: int, stop: int) -> StepLayout:
        positions = torch.arange(start, stop)
        return StepLayout(
            torch.arange(requests + 1, dtype=torch.int32) * (stop - start),
            torch.full((requests,), stop, dtype=torch.int32),
            (table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK).flatten(),
            table,
        )

    for start in range(0, length, 1024):
        stop = min(start + 1024, length)
        k = torch.randn(requests * (stop - start), heads[1], dim).bfloat16()
        for cache in caches:
            backend.store(cache, k, None if value_dim else k, backend.plan(layout(start, stop)))
    q = torch.randn(requests * new, heads[0], dim).bfloat16()
    at = layout(length - new, length)

    def step() -> None:
        plan = backend.plan(at)
        for cache in caches:
            backend.attend(q, cache, plan, scale=0.1, window=window)

    return step


def caches_of(backend: Any, num_blocks: int) -> list[Any]:
    """Return KV caches for enough layers to exceed the processor's caches."""
    import torch

    if hasattr(backend, "allocate"):  # a tree with a separate cache tensor for each layer
        layers = max(1, int(min(8, 2e8 // (num_blocks * backend.block_bytes()))))
        return [backend.allocate(num_blocks) for _ in range(layers)]
    from quire.ops.memory import empty

    layers = max(1, int(min(8, 2e8 // (num_blocks * backend.entry_bytes()))))
    memory = empty(num_blocks, layers * backend.entry_bytes(), dtype=torch.uint8, device=backend.shape.device)
    return [backend.view(memory, layer) for layer in range(layers)]


def product_cases() -> dict[str, Callable[[], Step]]:
    """Linear layers of Qwen3-0.6B (gate and up), and experts of Qwen3-30B-A3B."""
    cases: dict[str, Callable[[], Step]] = {}
    for dtype in ("bfloat16", "float32"):
        for rows in (1, 16, 64, 512):
            cases[f"linear {dtype} {rows} rows"] = lambda r=rows, d=dtype: linear(r, d)
    for bits in (8, 4):
        for rows in (1, 64, 512):
            cases[f"linear int{bits} {rows} rows"] = lambda r=rows, b=bits: quantized(r, b)
    for group in (1024, 128):
        for rows in (1, 16, 64, 512):
            cases[f"linear float8 groups of {group} {rows} rows"] = lambda r=rows, g=group: in_float8(r, g)
    for rows in (1, 8, 64):
        cases[f"experts bfloat16 {rows} rows each"] = lambda r=rows: experts(r)
    for tokens in (1, 64, 1024):
        cases[f"norm and gate {tokens} rows"] = lambda t=tokens: elementwise(t)
    return cases


def kernels(dtype: str) -> tuple[Any, Any]:
    import torch

    from quire.ops import Kernels, Target

    kind = getattr(torch, dtype)
    return Kernels(Target(torch.device("cpu"), kind)), kind


def linear(rows: int, dtype: str) -> Step:
    import torch

    ops, kind = kernels(dtype)
    weights = [torch.randn(6144, 1024).to(kind) for _ in range(4)]
    if hasattr(ops.linear, "pack"):
        weights = [ops.linear.pack(weight) for weight in weights]
    x = torch.randn(rows, 1024).to(kind)
    return lambda: [ops.linear(x, weight, None) for weight in weights]


def quantized(rows: int, bits: int) -> Step:
    import torch

    ops, kind = kernels("bfloat16")
    weights = [ops.quantized_linear.pack(ops.quantize(torch.randn(6144, 1024), bits, 32)) for _ in range(4)]
    x = torch.randn(rows, 1024).to(kind)
    return lambda: [ops.quantized_linear(x, weight, None) for weight in weights]


def in_float8(rows: int, group: int) -> Step:
    import torch

    from quire.ops.reference.quantized import QuantizedMatrix

    ops, kind = kernels("bfloat16")
    codes = [(torch.randn(6144, 1024) * 100).to(torch.float8_e4m3fn) for _ in range(4)]
    scales = torch.rand(6144, 1024 // group)
    weights = [ops.quantized_linear.pack(QuantizedMatrix(c, scales, group, 1024)) for c in codes]
    x = torch.randn(rows, 1024).to(kind)
    return lambda: [ops.quantized_linear(x, weight, None) for weight in weights]


def experts(rows: int) -> Step:
    import torch

    ops, kind = kernels("bfloat16")
    count = 64
    weight = torch.randn(count, 1536, 2048).to(kind)
    offsets = torch.arange(count + 1) * rows
    if hasattr(ops.grouped_linear, "pack"):
        weight = ops.grouped_linear.pack(weight)
    x = torch.randn(count * rows, 2048).to(kind)
    return lambda: ops.grouped_linear(x, weight, None, offsets)


def elementwise(tokens: int) -> Step:
    import torch

    ops, kind = kernels("bfloat16")
    x, residual, gates = (torch.randn(tokens, n).to(kind) for n in (1024, 1024, 6144))
    weight = torch.ones(1024).to(kind)
    return lambda: [(ops.add_rms_norm(x, residual, weight, 1e-6), ops.silu_and_mul(gates)) for _ in range(8)]


def all_cases(only: str) -> dict[str, Callable[[], Step]]:
    return {name: make for name, make in (attention_cases() | product_cases()).items() if only in name}


def work(threads: int, only: str, clock: Callable[[], float], cpu_isa: str) -> None:
    """One tree's process: the name of a case creates it, and each empty line runs it and returns the milliseconds."""
    import torch

    from quire.ops.cpu.build import choose_instruction_set

    choose_instruction_set(cpu_isa)
    torch.set_num_threads(threads)
    cases = all_cases(only)
    current = SimpleNamespace(step=None, repeats=1)
    for line in sys.stdin:
        if name := line.strip():
            current.step = None  # free the memory of the previous case
            current.step = cases[name]()
            current.step()
            started = clock()
            current.step()
            current.repeats = max(1, int(LEAST_SECONDS / (clock() - started)))
            print("ready", flush=True)
            continue
        started = clock()
        for _ in range(current.repeats):
            current.step()
        print((clock() - started) * 1e3 / current.repeats, flush=True)


class Tree:
    """The process of one source tree."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", *sys.argv[1:]]
        environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("trees", nargs="*", type=Path, help="before and after")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument(
        "--cpu-time", action="store_true", help="on a busy machine, with one thread: not the wall's time"
    )
    parser.add_argument("--cpu-isa", default="native", help="instruction set of the kernels")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        clock = time.process_time if options.cpu_time else time.perf_counter
        work(options.threads, options.only, clock, options.cpu_isa)
        return
    if len(options.trees) != 2:
        parser.error("two source trees are needed: before and after")
    trees = [Tree(root) for root in options.trees]
    ratios = []
    print(f"{options.threads} threads; milliseconds{'before':>36}{'after':>10}   best   median", flush=True)
    for name in all_cases(options.only):
        if [tree.ask(name) for tree in trees] != ["ready", "ready"]:
            raise SystemExit(f"{name} failed")
        rounds = []
        for i in range(options.rounds):
            pair = {tree: float(tree.ask("")) for tree in (trees if i % 2 else trees[::-1])}
            rounds.append([pair[tree] for tree in trees])
        best = [min(times) for times in zip(*rounds, strict=True)]
        ratios.append(median(after / before for before, after in rounds))
        print(f"{name:46}{best[0]:12.3f}{best[1]:10.3f}  {best[1] / best[0]:5.3f}  {ratios[-1]:6.3f}", flush=True)
    print(f"{'median of all cases':70}  {median(ratios):6.3f}")


if __name__ == "__main__":
    main()
