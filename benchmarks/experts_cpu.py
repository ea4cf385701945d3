"""Compares the grouped expert product on the CPU with one torch product per expert, at Qwen3-30B-A3B's sizes.

    python benchmarks/experts_cpu.py [--threads 2]

Prints the best milliseconds for 64 of its 128 experts, by rows per expert, and the rate at which their weights were
read.
"""

from __future__ import annotations

import argparse
import time

import torch

from quire.ops import OPS

EXPERTS = 64


def milliseconds(name: str, *arguments: object) -> float:
    function = next(i.function for i in OPS["grouped_linear"].implementations if i.name == name)
    function(*arguments)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function(*arguments)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    for dtype in (torch.bfloat16, torch.float32):
        for inner, outer in ((2048, 1536), (768, 2048)):  # gate and up, down
            weight = (torch.randn(EXPERTS, outer, inner) / inner**0.5).to(dtype)
            for rows in (1, 2, 4, 8, 16, 31, 64):
                x = torch.randn(EXPERTS * rows, inner).to(dtype)
                offsets = torch.arange(EXPERTS + 1) * rows
                ours, torchs = (milliseconds(name, x, weight, None, offsets) for name in ("cpu", "reference"))
                rate = f"{weight.nbytes / ours / 1e6:5.1f} GB/s {2 * x.numel() * outer / ours / 1e6:5.0f} GFLOP/s"
                what = f"{str(dtype)[6:]} {inner:4} -> {outer:4}, {rows:2} rows"
                print(f"{what}: {ours:7.2f}  {rate};  torch {torchs:7.2f}", flush=True)


if __name__ == "__main__":
    main()
