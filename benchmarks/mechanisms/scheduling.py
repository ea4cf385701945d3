"""Continuous batching, chunked prefill, the order of service, and preemption: counted in steps and tokens."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.mechanisms.engine import Arrival, Part, engine, run, tokens
from benchmarks.mechanisms.plot import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, axes
from quire.lora.files import find_adapter
from quire.messages.lora import Adapter, LoRARequest

ROWS = 8


def measure_continuous_batching() -> Any:
    """Run 32 requests with outputs of log-normal lengths on 8 rows: admitted as rows become free, or in batches of
    8."""
    draw = random.Random(1)
    outputs = [max(4, min(160, int(draw.lognormvariate(3.5, 0.9)))) for _ in range(32)]
    llm = engine(max_num_seqs=ROWS, enable_prefix_caching=False)
    requests = [Arrival(0, str(i), tokens(8, i), output) for i, output in enumerate(outputs)]
    continuous = [len(parts) for parts in run(llm, requests)]
    static = [
        len(parts) for first in range(0, len(requests), ROWS) for parts in run(llm, requests[first : first + ROWS])
    ]
    return {"outputs": outputs, "continuous": continuous, "static": static}


def draw_continuous_batching(data: Any, figure: Figure) -> None:
    for place, (name, color, title) in enumerate(
        (
            ("static", ORANGE, "Batches of 8 that wait for their longest answer"),
            ("continuous", BLUE, "A request begins as soon as another one has ended"),
        ),
        1,
    ):
        rows = data[name]
        part = axes(figure, "step" if place == 2 else "", "requests in a step", place=(2, 1, place))
        used = sum(rows) / (ROWS * len(rows))
        part.set_title(f"{title}: {len(rows)} steps, {used:.0%} of the rows in use", loc="left")
        part.stairs(rows, fill=True, color=color)
        part.set(xlim=(0, len(data["static"])), ylim=(0, ROWS))


def measure_chunked_prefill() -> Any:
    """Run six generating requests and a prompt of 600 tokens that arrives later, with two step sizes."""
    found = {}
    for budget in (1024, 64):
        llm = engine(max_num_seqs=8, max_num_batched_tokens=budget, enable_prefix_caching=False)
        short = [Arrival(0, str(i), tokens(4, i), 24) for i in range(6)]
        steps = run(llm, [*short, Arrival(6, "long", tokens(600, 9), 8)])
        found[str(budget)] = [
            [sum(p.count for p in parts if p.name != "long"), sum(p.count for p in parts if p.name == "long")]
            for parts in steps
        ]
    return found


def draw_chunked_prefill(data: Any, figure: Figure) -> None:
    for place, (budget, steps) in enumerate(data.items(), 1):
        part = axes(figure, "step", "tokens in the step" if place == 1 else "", place=(1, 2, place))
        part.set_title(f"budget {budget}: at most {max(map(sum, steps))} tokens", loc="left")
        others, long = zip(*steps, strict=True)
        numbers = range(1, len(steps) + 1)
        part.bar(numbers, others, 0.8, color=BLUE, label="six other requests")
        part.bar(numbers, long, 0.8, others, color=ORANGE, label="the long prompt")
    figure.axes[0].legend(loc="upper left", bbox_to_anchor=(0.3, 0.9))


def measure_scheduling_order() -> Any:
    """Run requests of three priorities on four rows, with a budget of 48 tokens per step."""
    llm = engine(max_num_seqs=4, max_num_batched_tokens=48, scheduling_policy="priority", enable_prefix_caching=False)
    requests = [
        Arrival(0, "A, priority 1", tokens(70, 1), 14, 1),
        Arrival(0, "B, priority 1", tokens(20, 2), 18, 1),
        Arrival(1, "C, priority 1", tokens(30, 3), 12, 1),
        Arrival(1, "D, priority 1", tokens(60, 4), 8, 1),
        Arrival(3, "E, priority 2", tokens(20, 5), 5, 2),
        Arrival(5, "F, priority 0", tokens(40, 6), 6, 0),
    ]
    steps = run(llm, requests)
    table = [{part.name: [part.count, part.start >= part.prompt] for part in parts} for parts in steps]
    return {"arrivals": {request.name: request.step for request in requests}, "steps": table}


def draw_scheduling_order(data: Any, figure: Figure) -> None:
    part = axes(figure, "step", "")
    names = list(data["arrivals"])
    for row, name in enumerate(names):
        first = next(number for number, step in enumerate(data["steps"]) if name in step)
        part.barh(row, first - data["arrivals"][name], 0.6, data["arrivals"][name], color="#e2e8f0")
        for number, step in enumerate(data["steps"]):
            if name in step:
                count, decodes = step[name]
                part.barh(row, 1, 0.6, number, color=BLUE if decodes else ORANGE, edgecolor="white")
                part.text(number + 0.5, row, str(count), ha="center", va="center", color="white", fontsize=7.5)
    part.set_yticks(range(len(names)), names)
    part.invert_yaxis()
    part.grid(axis="y", visible=False)
    for label, color in (("waits", "#e2e8f0"), ("tokens of its prompt", ORANGE), ("its last token", BLUE)):
        part.barh(0, 0, color=color, label=label)
    part.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def measure_preemption() -> Any:
    """Eight requests that become 128 tokens long each need 64 blocks; the cache has fewer."""
    found = []
    for blocks in (65, 57, 49, 41, 33, 25):
        for cached in (True, False):
            llm = engine(
                max_num_seqs=8, num_gpu_blocks_override=blocks, max_model_len=256, enable_prefix_caching=cached
            )
            steps = run(llm, [Arrival(0, str(i), tokens(32, i), 96) for i in range(8)])
            computed = sum(part.count for parts in steps for part in parts)
            found.append(
                {
                    "blocks": blocks - 1,
                    "prefix caching": cached,
                    "steps": len(steps),
                    "computed": computed,
                    "preemptions": llm.core.stats.preemptions,
                }
            )
    return found


def draw_preemption(data: Any, figure: Figure) -> None:
    least = min(row["computed"] for row in data)
    blocks = sorted({row["blocks"] for row in data}, reverse=True)
    left = axes(figure, "blocks of the KV cache", "preemptions", place=(1, 2, 1))
    right = axes(figure, "blocks of the KV cache", "tokens computed again", place=(1, 2, 2))
    for cached, color, label in ((True, BLUE, "with prefix caching"), (False, RED, "without")):
        rows = [row for row in data if row["prefix caching"] is cached]
        left.plot(blocks, [row["preemptions"] for row in rows], "o-", color=color, label=label)
        right.plot(blocks, [row["computed"] - least for row in rows], "o-", color=color, label=label)
    for part in (left, right):
        part.set_xticks(blocks)
        part.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend()
    left.invert_xaxis()
    right.invert_xaxis()


def measure_lora() -> Any:
    """Run 24 requests for 8 adapters, with at most 1, 2, 4 or 8 adapters in a batch."""
    found = {}
    rhyme = find_adapter(LoRARequest("rhyme", lora_path="quire-demo/rhyme"))
    copies = [Adapter(f"rhyme-{i}", f"{rhyme.key}-{i}", rhyme.path) for i in range(8)]  # different keys: not the same
    for most in (1, 2, 4, 8):
        llm = engine(max_num_seqs=24, enable_lora=True, max_loras=most, max_cpu_loras=8)
        requests = [Arrival(0, str(i), tokens(6, i), 16, adapter=copies[i % 8]) for i in range(24)]
        found[str(most)] = [len(parts) for parts in run(llm, requests)]
        llm.shutdown()
    return found


def draw_lora(data: Any, figure: Figure) -> None:
    part = axes(figure, "step", "requests in the step")
    for (most, rows), color in zip(data.items(), (RED, ORANGE, VIOLET, BLUE), strict=True):
        part.stairs(rows, label=f"--max-loras {most}: {len(rows)} steps", color=color, linewidth=1.8)
    part.set_ylim(0, 26)
    part.legend()


def measure_engine_core() -> Any:
    """Count the bytes of each step's message, for 4 requests with prompts of 200 tokens and one that arrives later."""
    sizes = list[list[int]]()

    def watch(parts: list[Part], step: Any) -> None:
        whole = [list(range(part.start + part.count)) for part in parts]
        sizes.append([len(msgspec.msgpack.encode(step)), len(msgspec.msgpack.encode(whole))])

    llm = engine(max_num_seqs=8, enable_prefix_caching=False)
    run(llm, [*(Arrival(0, str(i), tokens(200, i), 60) for i in range(4)), Arrival(30, "4", tokens(200, 4), 30)], watch)
    return sizes


def draw_engine_core(data: Any, figure: Figure) -> None:
    part = axes(figure, "step", "bytes of the message")
    numbers = range(1, len(data) + 1)
    part.plot(numbers, [whole for _, whole in data], color=GREY, label="if each step had all token ids of its requests")
    part.plot(numbers, [size for size, _ in data], color=GREEN, label="SchedulerOutput: what has changed")
    part.set_yscale("log")
    part.legend(loc="center right")
