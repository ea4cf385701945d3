"""Compares all-reduces between ranks of one machine: Quire's implementation and torch's, interleaved.

    python -m benchmarks.sums_of_ranks [--ranks 2] [--rounds 7] [--device cuda]

On CPUs, through shared memory and through Gloo; each rank is a process with one thread. On GPUs, through symmetric
memory and through NCCL, in CUDA graphs; each rank has a GPU. It reports the microseconds of an all-reduce on the
slowest rank, as medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire.ops.cpu.shared_sums import with_shared_sums
from quire.parallel.mesh import Communicator, join, open_meeting
from quire.parallel.sizes import MeshSizes
from quire.parallel.symmetric_sums import with_symmetric_sums

SIZES = (2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes, of bfloat16
WAYS = {"cpu": ("shared memory", "Gloo"), "cuda": ("symmetric memory", "NCCL")}
_IN_A_GRAPH = 20  # sums


def work(ranks: int, rank: int, port: int, rounds: int, kind: str) -> None:
    """Run one rank. It prints the seconds of each round's all-reduces, by way and size."""
    torch.set_num_threads(1)
    mesh = join(MeshSizes(tp=ranks), rank, "127.0.0.1", port, kind=kind)
    plain = mesh.tp
    device = mesh.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        fast = with_symmetric_sums(plain, device, torch.bfloat16)
    else:
        fast = with_shared_sums(plain)
    times: dict[str, list[float]] = {f"{way} {size}": [] for way in WAYS[kind] for size in SIZES}
    runs = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        for way, group in zip(WAYS[kind], (fast, plain), strict=True):
            runs[way, size] = _on_gpu(group, x) if kind == "cuda" else _on_cpu(group, x)
    for _ in range(rounds):
        for (way, size), run in runs.items():
            plain.minimum(0)
            times[f"{way} {size}"].append(run())
    print(json.dumps(times))


def _on_cpu(group: Communicator, x: Any) -> Callable[[], float]:
    """Return a function that returns the seconds of an all-reduce."""
    count = max(5, min(500, (64 << 20) // x.nbytes // 8))

    def run() -> float:
        started = time.perf_counter()
        for _ in range(count):
            group.all_reduce(x)
        return (time.perf_counter() - started) / count

    return run


def _on_gpu(group: Communicator, x: Any) -> Callable[[], float]:
    group.all_reduce(x)  # NCCL connects
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        for _ in range(_IN_A_GRAPH):
            group.all_reduce(x)

    def run() -> float:
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / _IN_A_GRAPH

    return run


def measure(ranks: int, rounds: int, kind: str) -> dict[str, list[float]]:
    """Return the seconds of an all-reduce in each round on the slowest rank, by way and size in bytes: "Gloo 2048"."""
    meeting = open_meeting("127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.sums_of_ranks", f"--ranks={ranks}", f"--rounds={rounds}"]
    processes = [
        subprocess.Popen(
            [*command, f"--device={kind}", "--work", str(rank), str(meeting.port)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for rank in range(ranks)
    ]
    made = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {name: [max(times) for times in zip(*(m[name] for m in made), strict=True)] for name in made[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=list(WAYS), default="cpu")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.ranks, *options.work, options.rounds, options.device)
        return
    slowest, (fast, plain) = measure(options.ranks, options.rounds, options.device), WAYS[options.device]
    print(f"| KiB, {options.ranks} ranks | {fast}, µs | {plain}, µs | ratio |\n|---|---|---|---|")
    for size in SIZES:
        ours, theirs = (slowest[f"{way} {size}"] for way in (fast, plain))
        ratio = median(b / a for a, b in zip(ours, theirs, strict=True))
        print(f"| {size >> 10:,} | {1e6 * median(ours):.1f} | {1e6 * median(theirs):.1f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
