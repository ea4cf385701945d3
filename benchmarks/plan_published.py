"""Compares the estimates of `quire plan` with published measurements of vLLM, TensorRT-LLM and NIM on NVIDIA's GPUs.

    python -m benchmarks.plan_published

Each row is simulated as it was measured: with the same number of requests or concurrency, lengths of prompts and
outputs, layout and weight type, and with the engine's limits as far as they are known. Estimated times are those of the
devices, with the shares in quire/planner/devices.toml; they do not include the host work of the other engines. The
tables were not selected by how well they agree.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median

from benchmarks.gpu.shapes import SHAPES
from quire.models.registry import spec_of
from quire.planner.devices import DEVICES
from quire.planner.layout import Layout, Stages
from quire.planner.memory import EngineOptions, kv_groups, memory_of
from quire.planner.roofline import RooflineTimes
from quire.planner.simulate import Replica, simulate
from quire.planner.sizes import Footprint, parameters_of
from quire.planner.traffic import Arrival, Traffic
from quire.scheduler.limits import SchedulerLimits

TRT = "TensorRT-LLM, performance overview of v1.0 (docs/source/performance/perf-overview.md)"
NIM = "NVIDIA NIM 1.8.0 (docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance)"
YOBITEL = "vLLM 0.21.0, H100 80 GB HBM3 (yobitelcomm.github.io/bench/recipes/concurrency-sweep)"
MUSGRAVE = "vLLM 0.23.0 (johnmusgrave.com/p/vllm-throughput-latency-sweep-on)"
MANY = 4096  # requests at a time, if none are stated
FP8, BF16 = 1.0, 2.0  # bytes per weight


@dataclass(frozen=True)
class Published:
    """A measurement. concurrency: requests at a time. metric: tokens/s, or TPOT or TTFT in seconds, and its value."""

    source: str
    model: str
    device: str
    layout: Layout
    weight: float
    prompt: int
    output: int
    concurrency: int
    metric: str
    value: float
    requests: int = 0
    batched_tokens: int = 8192
    kv_element_bytes: int = 2


def _throughputs() -> list[Published]:
    """TensorRT-LLM's measurements, in output tokens per second: all requests at once."""
    lengths = [(128, 2048, 3000), (1000, 1000, 3000), (2048, 128, 3000), (5000, 500, 1500)]  # in, out, requests
    table = {  # model, device, ranks: values for these lengths
        ("llama-3-8b", "H100", 1): (22_714, 15_220, 3_450, 3_459),
        ("llama-3-8b", "H200", 1): (26_221, 17_744, 3_538, 3_902),
        ("llama-3-70b", "H100", 2): (6_651, 4_205, 762, 898),
        ("llama-3-70b", "H200", 1): (4_336, 2_909, 442, 566),
    }
    return [
        Published(
            TRT,
            model,
            device,
            Layout(ranks),
            FP8,
            prompt,
            output,
            MANY,
            "tokens/s",
            value,
            requests=requests,
            kv_element_bytes=1,
        )
        for (model, device, ranks), values in table.items()
        for (prompt, output, requests), value in zip(lengths, values, strict=True)
    ]


def _latencies() -> list[Published]:
    found = []
    nim = {1: 0.01858, 5: 0.02183, 25: 0.03875, 50: 0.05973}
    shared = (NIM, "llama-3-70b", "H100", Layout(2), FP8, 5000, 500)
    found += [Published(*shared, concurrency, "TPOT", tpot) for concurrency, tpot in nim.items()]
    # With several requests at a time, TTFT depends on how far apart the client's requests have drifted.
    found.append(Published(*shared, 1, "TTFT", 0.40677))
    # The page does not state lengths. A TTFT of 14 ms suggests a short chat with about 100 tokens.
    for concurrency, tpot in ((1, 0.00648), (4, 0.00659), (16, 0.01094), (64, 0.04691)):
        found.append(Published(YOBITEL, "llama-3-8b", "H100", Layout(), BF16, 128, 128, concurrency, "TPOT", tpot))
    found.append(Published(MUSGRAVE, "llama-3-8b", "A100-40GB", Layout(), BF16, 1024, 128, 1, "TPOT", 1 / 75))
    return found


PUBLISHED = [*_latencies(), *_throughputs()]


def counted(row: Published) -> float:
    """Return the same metric from the simulation."""
    spec = spec_of(SHAPES[row.model])
    device = DEVICES[row.device]
    layout = row.layout
    footprint = Footprint(spec, parameters_of(spec), row.weight, 2, 2)
    options = EngineOptions(
        row.prompt + row.output,
        row.concurrency,
        max(row.batched_tokens, row.concurrency),
        kv_element_bytes=row.kv_element_bytes,
    )
    memory = memory_of(footprint, layout, device, options, None)
    limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len, depth=2)
    groups = kv_groups(Stages(footprint, layout).parts[0], options.max_model_len)
    times = RooflineTimes(footprint, layout, device, None, row.kv_element_bytes)
    count = row.requests or 4 * row.concurrency
    traffic = Traffic([Arrival(0.0, row.prompt, row.output) for _ in range(count)])
    run = simulate(traffic, Replica(limits, memory.blocks, groups, 16), times)
    if row.metric == "tokens/s":
        return count * row.output / run.seconds
    if row.metric == "TPOT":
        return median((request.tokens[-1] - request.tokens[0]) / (row.output - 1) for request in run.requests)
    return run.requests[0].tokens[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose model, device or source contains this")
    only = parser.parse_args().only.lower()
    rows = [row for row in PUBLISHED if only in f"{row.model} {row.device} {row.source}".lower()]
    for source in dict.fromkeys(row.source for row in rows):
        print(f"\n{source}\n")
        print("| model | devices | weights | in, out | at a time | metric | published | counted | counted time |")
        print("|---|---|---|---|---|---|---|---|---|")
        errors = []
        for row in (row for row in rows if row.source == source):
            value = counted(row)
            is_rate = row.metric == "tokens/s"
            errors.append((row.value / value if is_rate else value / row.value) - 1)
            shown = [f"{v:,.0f}" if is_rate else f"{v * 1e3:,.1f} ms" for v in (row.value, value)]
            at_a_time = "all" if row.concurrency == MANY else str(row.concurrency)
            print(
                f"| {row.model} | {row.layout.ranks} {row.device} | {'fp8' if row.weight == FP8 else 'bf16'} | "
                f"{row.prompt:,}, {row.output:,} | {at_a_time} | {row.metric} | {shown[0]} | {shown[1]} | "
                f"{errors[-1]:+.0%} |",
                flush=True,
            )
        print(f"\nCounted times differ by {min(errors):+.0%} to {max(errors):+.0%}, median {median(errors):+.0%}.")


if __name__ == "__main__":
    main()
