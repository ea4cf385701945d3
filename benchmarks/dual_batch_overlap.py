"""Measures how much of the communication between ranks is hidden behind computation (--enable-dbo).

    python -m benchmarks.dual_batch_overlap [--rounds 7] [--tokens 256,1024]

Two replicas that share experts, each a process with one thread, run the forward pass of a mixture of experts. The link
between them is emulated: exchanges use it one after the other, and a process sleeps until its bytes would have passed
over a link of the given rate. Each round runs a step in three ways: whole with an infinitely fast link, whole with the
emulated link, and in two halves with the emulated link. Counts of rows do not use the link: on GPUs, they go from host
to host.

    hidden = (computing + link - halves) / min(computing, link)      1 is the best that overlap can do
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.layers.step_inputs import StepSize
from quire.parallel.mesh import Communicator, Exchange, join, open_meeting
from quire.parallel.sizes import MeshSizes
from quire.worker.worker import Worker

SHARES = (0.25, 0.5, 1.0, 2.0)  # time on the link as a share of the time of computing
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072,
    "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 4096, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


class Link:
    """One rank's end of the emulated link. rate: bytes per second."""

    def __init__(self) -> None:
        self.rate = float("inf")
        self.is_free_at = 0.0
        self.bytes = 0

    def carry(self, size: int) -> float:
        """Return the time at which this many bytes have passed."""
        self.bytes += size
        self.is_free_at = max(self.is_free_at, time.perf_counter()) + size / self.rate
        return self.is_free_at


@dataclass
class Slow(Exchange):
    arrives_at: float = 0.0

    def wait(self) -> Tensor:
        out = super().wait()
        time.sleep(max(0.0, self.arrives_at - time.perf_counter()))
        return out


@dataclass(frozen=True)
class Linked(Communicator):
    link: Any = None

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Exchange:
        exchange = super().all_to_all(x, sent, received)
        if not x.is_floating_point():
            return exchange
        away = (sum(sent) - sent[self.rank]) * x[:1].nbytes
        return Slow(exchange.out, exchange.work, self.link.carry(away))


def work(rank: int, port: int, directory: Path, tokens: list[int], rounds: int) -> None:
    """Run one rank. It prints the seconds of each round by number of tokens, communication share and way."""
    torch.set_num_threads(1)
    link = Link()
    mesh = join(MeshSizes(dp=2), rank, "127.0.0.1", port)
    ep = Linked(mesh.ep.rank, mesh.ep.size, mesh.ep.group, link=link)
    common: dict[str, Any] = {
        "model": str(directory),
        "load_format": "dummy",
        "max_model_len": 512,
        "max_num_seqs": 256,
        "device": "cpu",
        "max_num_batched_tokens": max(tokens),
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "num_gpu_blocks_override": 256,
    }
    halves = {"enable_dbo": True, "dbo_prefill_token_threshold": 2, "dbo_decode_token_threshold": 2}
    runners = {
        way: Worker(EngineConfig.create(**common, **more), directory, 512, replace(mesh, ep=ep)).runner
        for way, more in (("whole", {}), ("halves", halves))
    }
    times: dict[str, list[float]] = {}
    ids = torch.randint(MODEL["vocab_size"], (max(tokens),), generator=torch.Generator().manual_seed(rank))

    def step(way: str, count: int, rate: float) -> tuple[float, int]:
        runner = runners[way]
        inputs = runner.staging.stage_dummy(StepSize(count, 256))
        inputs.input_ids.copy_(ids[:count])  # different tokens, so that all experts have work
        link.rate = rate
        link.bytes = 0
        mesh.dp.minimum(0)
        started = link.is_free_at = time.perf_counter()
        with torch.inference_mode():
            runner.forward(inputs)
        return mesh.dp.minimum(-int(1e9 * (time.perf_counter() - started))) / -1e9, link.bytes

    for count in tokens:
        for way in runners:
            step(way, count, float("inf"))
        for _ in range(rounds):
            for share in SHARES:
                computing, size = step("whole", count, float("inf"))
                times.setdefault(f"{count} computing", []).append(computing)
                rate = size / (share * computing)
                link_seconds = share * computing
                whole, _ = step("whole", count, rate)
                in_halves, _ = step("halves", count, rate)
                hidden = (computing + link_seconds - in_halves) / min(computing, link_seconds)
                for name, value in (("whole", whole), ("halves", in_halves), ("hidden", hidden)):
                    times.setdefault(f"{count} {share} {name}", []).append(value)
                times.setdefault(f"{count} {share} rate", []).append(rate)
    print(json.dumps(times))
    sys.stdout.flush()
    os._exit(0)  # Gloo may abort a process that ends right after a collective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", default="256,1024")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [int(count) for count in options.tokens.split(",")]
    if options.work is not None:
        rank, port, directory = options.work
        work(int(rank), int(port), Path(directory), tokens, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        meeting = open_meeting("127.0.0.1")
        command = [sys.executable, "-m", "benchmarks.dual_batch_overlap", *sys.argv[1:], "--work"]
        processes = [
            subprocess.Popen([*command, str(rank), str(meeting.port), folder], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        times, _ = (json.loads(process.communicate()[0].splitlines()[-1]) for process in processes)
    print("| tokens a rank | computing, ms | link, ms (MB/s) | whole step, ms | in halves, ms | hidden, % |")
    print("|---|---|---|---|---|---|")
    for count in tokens:
        computing = median(times[f"{count} computing"])
        for share in SHARES:
            whole, halves, hidden, rate = (
                median(times[f"{count} {share} {name}"]) for name in ("whole", "halves", "hidden", "rate")
            )
            print(
                f"| {count} | {1e3 * computing:.0f} | {1e3 * share * computing:.0f} ({rate / 1e6:.0f}) | "
                f"{1e3 * whole:.0f} | {1e3 * halves:.0f} | {100 * hidden:.0f} |"
            )


if __name__ == "__main__":
    main()
