"""Compares exchanges of tokens between replicas that share experts: by counts, and with a fixed capacity.

    python -m benchmarks.expert_exchange [--ranks 4] [--tokens 1,8,32,128,256]

Real processes run one MoE layer with the router and the experts' numbers of Qwen3-30B-A3B (128 experts, 8 of them for a
token, hidden size 2,048; the experts are narrower), and exchange tokens with Gloo on CPUs. For each number of tokens on
a rank, the table shows the bytes that a rank sends in a layer, the collectives, and those whose result the host reads
before the next one can start. The results of both exchanges are compared. Nothing here runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import DenseWeight
from quire.layers.moe import MoE
from quire.layers.specs import MoESpec
from quire.ops import OPS, Kernels, Target
from quire.parallel.experts import ExpertRanks, StepCapacity
from quire.parallel.mesh import Communicator, Exchange, join, open_meeting
from quire.parallel.sizes import MeshSizes

EXPERTS, TOP_K, HIDDEN, SIZE = 128, 8, 2048, 64
NAMES = {"router": "router"} | {f"expert_{key}": f"experts.{{e}}.{key}" for key in ("gate", "up", "down")}


@dataclass(frozen=True)
class Counting(Communicator):
    """Counts the bytes that this rank sends to others, as in a ring."""

    counted: Counter[str] = field(default_factory=Counter)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        away = sum(sent) - sent[self.rank]
        self.counted.update(calls=1, bytes=away * x[:1].nbytes, host=int(not x.is_floating_point()))
        return super().all_to_all(x, sent, received)

    def gather_equal(self, x: Tensor) -> Exchange:
        self.counted.update(calls=1, bytes=(self.size - 1) * x.nbytes)
        return super().gather_equal(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.counted.update(calls=1, bytes=x.nbytes * (self.size - 1) // self.size)
        return super().reduce_scatter(x)


def layer_of(ranks: ExpertRanks) -> MoE:
    """Return this rank's part of the layer, in bfloat16, with weights that depend on their names only."""
    kernels = Kernels(Target(torch.device("cpu"), torch.bfloat16), dict.fromkeys(OPS, "reference"))
    builder = Builder(kernels, Communicator(), lambda name: DenseWeight, experts=ranks)
    layer = MoE(builder, MoESpec(EXPERTS, TOP_K, SIZE), HIDDEN, NAMES)

    def fill(slot: object) -> None:
        name = slot.name  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(sum(name.encode()) * len(name))
        target = slot.target  # type: ignore[attr-defined]
        target.copy_(torch.randn(target.shape, generator=generator) / target.shape[-1] ** 0.5)

    builder.fill(fill)
    return layer


def work(rank: int, ranks: int, port: int, tokens: list[int]) -> None:
    """Run one rank. It prints the counts and the largest difference by number of tokens and exchange."""
    torch.set_num_threads(1)
    mesh = join(MeshSizes(dp=ranks), rank, "127.0.0.1", port)
    group = Counting(rank, ranks, mesh.ep.group)
    capacity = StepCapacity(group)
    shared = ExpertRanks(group, replicated=False, capacity=capacity)
    layers = {name: layer_of(replace(shared, backend=name)) for name in ("all_to_all", "allgather_reducescatter")}
    found: dict[str, list[float]] = {}
    for count in tokens:
        x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1000 * rank + count)).bfloat16()
        results = {}
        for name, layer in layers.items():
            capacity.agree(count, 1)
            group.counted.clear()
            with torch.inference_mode():
                results[name] = layer(x.clone()).float()
            counted = group.counted
            found[f"{count} {name}"] = [counted["bytes"], counted["calls"], counted["host"]]
        exact = results["all_to_all"]
        error = (results["allgather_reducescatter"] - exact).abs().max() / exact.abs().max()
        found[f"{count} difference"] = [float(error)]
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # Gloo may abort a process that ends right after a collective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", default="1,8,32,128,256")
    parser.add_argument("--work", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [int(count) for count in options.tokens.split(",")]
    if options.work is not None:
        rank, port = options.work
        work(rank, options.ranks, port, tokens)
    meeting = open_meeting("127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.expert_exchange", *sys.argv[1:], "--work"]
    processes = [
        subprocess.Popen([*command, str(rank), str(meeting.port)], stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    print("| tokens a rank | by counts: KiB, collectives, read by the host | fixed: the same | difference |")
    print("|---|---|---|---|")
    for count in tokens:
        cells = []
        for name in ("all_to_all", "allgather_reducescatter"):
            size = sum(of_rank[f"{count} {name}"][0] for of_rank in found) / len(found)
            cells.append(f"{size / 1024:,.0f}, {found[0][f'{count} {name}'][1]}, {found[0][f'{count} {name}'][2]}")
        difference = max(of_rank[f"{count} difference"][0] for of_rank in found)
        print(f"| {count} | {' | '.join(cells)} | {difference:.1e} |")


if __name__ == "__main__":
    main()
