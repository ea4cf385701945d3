"""How long ranks of one machine take to sum a tensor: through shared memory and through Gloo, in turns.

    python -m benchmarks.sums_of_ranks [--ranks 2] [--rounds 7]

Each rank is a process with one thread. Reported are microseconds of a sum by the slowest rank, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

import torch

from quire.ops.cpu.shared_sums import with_shared_sums
from quire.parallel.mesh import join, open_meeting
from quire.parallel.sizes import MeshSizes

SIZES = (2 << 10, 16 << 10, 64 << 10, 256 << 10, 4 << 20)  # bytes, of bfloat16


def work(ranks: int, rank: int, port: int, rounds: int) -> None:
    """What a rank does. It prints the seconds of each round's sums, by way and size."""
    torch.set_num_threads(1)
    gloo = join(MeshSizes(tp=ranks), rank, "127.0.0.1", port).tp
    ways = {"shared memory": with_shared_sums(gloo), "Gloo": gloo}
    times: dict[str, list[float]] = {f"{way} {size}": [] for way in ways for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            x, count = torch.zeros(size // 2, dtype=torch.bfloat16), max(5, min(500, (64 << 20) // size // 8))
            for way, group in ways.items():
                gloo.minimum(0)
                started = time.perf_counter()
                for _ in range(count):
                    group.all_reduce(x)
                times[f"{way} {size}"].append((time.perf_counter() - started) / count)
    print(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.ranks, *options.work, options.rounds)
        return
    meeting = open_meeting("127.0.0.1")
    command = [
        sys.executable,
        "-m",
        "benchmarks.sums_of_ranks",
        f"--ranks={options.ranks}",
        f"--rounds={options.rounds}",
    ]
    processes = [
        subprocess.Popen([*command, "--work", str(rank), str(meeting.port)], stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    made = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    slowest = {name: [max(times) for times in zip(*(m[name] for m in made), strict=True)] for name in made[0]}
    print(f"| KiB, {options.ranks} ranks | shared memory, µs | Gloo, µs | ratio |\n|---|---|---|---|")
    for size in SIZES:
        shared, gloo = (slowest[f"{way} {size}"] for way in ("shared memory", "Gloo"))
        ratio = median(b / a for a, b in zip(shared, gloo, strict=True))
        print(f"| {size >> 10:,} | {1e6 * median(shared):.1f} | {1e6 * median(gloo):.1f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
