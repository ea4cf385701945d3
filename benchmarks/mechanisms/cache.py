"""The KV cache: blocks, slots, prefixes, tiers, compression and transfers, counted in tokens, blocks and bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.mechanisms.engine import Arrival, engine, run, tokens
from benchmarks.mechanisms.plot import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, axes, label_bars

RUNS = Path(__file__).parents[2] / "quire" / "server" / "page" / "static" / "runs.json"
BLOCK = 16
LONGEST = 2048


def measure_paged_attention() -> Any:
    """Count the tokens stored by 12 requests of different lengths, and the slots of their blocks, in each step."""
    draw = random.Random(2)
    llm = engine(max_num_seqs=6, enable_prefix_caching=False)
    found = list[list[int]]()
    pool = llm.core.scheduler.kv.pool

    def watch(parts: Any, step: Any) -> None:
        running = [request for request in llm.core.scheduler.running if request.num_retired_tokens]
        stored = sum(request.num_retired_tokens for request in running)
        found.append([stored, BLOCK * (pool.num_usable - pool.num_free), len(running)])

    requests = [Arrival(0, str(i), tokens(draw.randrange(10, 200), i), draw.randrange(20, 150)) for i in range(12)]
    run(llm, requests, watch)
    return found[:-1]


def draw_paged_attention(data: Any, figure: Figure) -> None:
    stored, held, running = zip(*data, strict=True)
    left = axes(figure, "step", "slots", place=(1, 2, 1))
    left.stairs(held, color=ORANGE, label="in blocks of 16 tokens", linewidth=1.5)
    left.stairs(stored, fill=True, color=BLUE, label="with a token")
    left.set_ylim(0, 1.35 * max(held))
    left.legend(loc="upper right")
    right = axes(figure, "", "slots with a token, %", place=(1, 2, 2))
    shares = [100 * sum(stored) / sum(held), 100 * sum(stored) / (LONGEST * sum(running))]
    right.bar(["blocks", f"{LONGEST:,} slots\nfor each request"], shares, 0.55, color=[ORANGE, GREY])
    right.grid(axis="x", visible=False)
    label_bars(right, form="{:.0f} %")
    right.set_ylim(0, 108)


def draw_slot_mapping(data: Any, figure: Figure) -> None:
    """data: the first two steps of the page's recorded run of continuous batching."""
    for place, step in enumerate(data["steps"], 1):
        part = axes(figure, "index in the super sequence", "slot" if place == 1 else "", place=(1, 2, place))
        part.set_title(f"step {place}", loc="left")
        first = 0
        for request, color in zip(step, (BLUE, ORANGE, GREEN), strict=True):
            indices = range(first, first + len(request["slots"]))
            part.plot(indices, request["slots"], "o", color=color, label=f"request {request['id']}", markersize=4)
            for index, slot in list(zip(indices, request["slots"], strict=True))[:: 1 if place == 2 else 4]:
                part.annotate(str(slot), (index, slot), (4, -9), textcoords="offset points", fontsize=7.5)
            first += len(request["slots"])
        part.set_yticks(range(0, 61, data["block_size"]), [str(n) if n % 8 == 0 else "" for n in range(0, 61, 4)])
        part.set_ylim(0, max(slot for request in data["steps"][0] for slot in request["slots"]) + 6)
        part.set_xlim(-0.6, first - 0.2)
    figure.axes[0].legend(loc="upper left")


def measure_slot_mapping() -> Any:
    run = json.loads(RUNS.read_text(encoding="utf-8"))[0]
    steps = [
        [{name: part[name] for name in ("id", "slots", "table", "positions")} for part in step["parts"]]
        for step in run["steps"][:2]
    ]
    return {"source": "quire/server/page/static/runs.json", "block_size": run["block_size"], "steps": steps}


def measure_prefix_caching() -> Any:
    """Run a conversation of 10 turns, whose prompts contain all earlier turns, and 8 prompts with a common prefix."""
    found = {}
    for cached in (True, False):
        llm = engine(max_num_seqs=4, enable_prefix_caching=cached)
        text = tokens(100, 0)
        turns = []
        for turn in range(10):
            text = text + tokens(40, turn)
            parts = [parts[0] for parts in run(llm, [Arrival(0, f"turn {turn}", list(text), 30)])]
            turns.append([len(text), sum(part.count for part in parts if part.start < part.prompt)])
            text = text + tokens(30, 100 + turn)  # an answer that a client has changed is computed again
        shared = [Arrival(3 * i, str(i), tokens(500, 50) + tokens(50, i), 4) for i in range(8)]
        counts = dict.fromkeys((arrival.name for arrival in shared), 0)
        for parts in run(llm, shared):
            for part in parts:
                counts[part.name] += part.count if part.start < part.prompt else 0
        found["with" if cached else "without"] = {"turns": turns, "shared": list(counts.values())}
    return found


def draw_prefix_caching(data: Any, figure: Figure) -> None:
    left = axes(figure, "turn of a conversation", "tokens computed", place=(1, 2, 1))
    right = axes(figure, "prompt with the same 500 tokens", "", place=(1, 2, 2))
    for name, color, shift in (("without", GREY, -0.2), ("with", BLUE, 0.2)):
        turns, shared = ([*data[name][of]] for of in ("turns", "shared"))
        left.bar([i + shift for i in range(1, 11)], [count for _, count in turns], 0.4, color=color)
        right.bar([i + shift for i in range(1, 9)], shared, 0.4, color=color, label=f"{name} prefix caching")
    for part, most in ((left, 800), (right, 720)):
        part.set_ylim(0, most)
        part.set_xticks(range(1, 11 if part is left else 9))
    right.legend(ncols=2, loc="upper right", fontsize=8.5, columnspacing=1)


def measure_kv_tiers() -> Any:
    """Run 12 conversations of 4 turns, with a cache for three to five of them, with and without 64 MiB of CPU
    memory."""
    found = {}
    for size in (0.0, 1 / 16):
        llm = engine(max_num_seqs=4, num_gpu_blocks_override=120, max_model_len=1024, kv_offloading_size=size or None)
        texts = [tokens(300, i) for i in range(12)]
        computed = []
        prompts = []
        for turn in range(4):
            count = 0
            for number, text in enumerate(texts):
                text += tokens(60, 100 * turn + number)
                for parts in run(llm, [Arrival(0, f"{number} {turn}", list(text), 2)]):
                    count += sum(part.count for part in parts)
            computed.append(count)
            prompts.append(sum(map(len, texts)))
        found[str(size)] = {"computed": computed, "prompts": prompts}
        llm.shutdown()
    return found


def draw_kv_tiers(data: Any, figure: Figure) -> None:
    part = axes(figure, "turn of 12 conversations", "tokens computed, all conversations")
    series = (
        ("prompts", "0.0", GREY, "tokens of the prompts"),
        ("computed", "0.0", ORANGE, "computed, KV cache alone"),
        ("computed", "0.0625", BLUE, "computed, with --kv-offloading-size"),
    )
    for place, (name, size, color, label) in enumerate(series):
        values = data[size][name]
        part.bar([turn + 0.27 * (place - 1) for turn in range(1, 5)], values, 0.27, color=color, label=label)
    part.set_xticks(range(1, 5))
    part.legend(loc="upper left")


def measure_kv_compression() -> Any:
    """Count the blocks of one request with a prompt of 512 tokens, in each step, by compression ratio."""
    found = {}
    for ratio in (1, 2, 4, 8):
        options = {"ratio": ratio, "interval": 256} if ratio > 1 else {}
        llm = engine(max_num_seqs=1, enable_prefix_caching=False, kv_compression=options)
        held = list[int]()
        pool = llm.core.scheduler.kv.pool
        run(llm, [Arrival(0, "a", tokens(512, 1), 600)], lambda *_: held.append(pool.num_usable - pool.num_free))  # noqa: B023
        found[str(ratio)] = held[:-1]
        llm.shutdown()
    return found


def draw_kv_compression(data: Any, figure: Figure) -> None:
    part = axes(figure, "tokens of output", "blocks of the request")
    for (ratio, held), color in zip(data.items(), (GREY, VIOLET, BLUE, GREEN), strict=True):
        label = "without compression" if ratio == "1" else f'"ratio": {ratio}, "interval": 256'
        part.plot(held, color=color, label=label)
    part.set_ylim(0)
    part.legend(loc="upper left")


def draw_kv_transfer(data: Any, figure: Figure) -> None:
    left = axes(figure, "time of the link / time of the step", "seconds to the first token", place=(1, 2, 1))
    shares, steps, layers = (data["layers"][name] for name in ("link", "by steps", "by layers"))
    places = range(len(shares))
    left.bar([x - 0.2 for x in places], steps, 0.4, color=GREY, label="read when the step has ended")
    left.bar([x + 0.2 for x in places], layers, 0.4, color=BLUE, label="read layer by layer")
    left.set_xticks(places, [f"{share:g}" for share in shares])
    left.set_ylim(0, 6)
    left.legend(loc="upper left")
    right = axes(figure, "", "longest pause in an answer, s", place=(1, 2, 2))
    right.bar(["together", "apart"], data["longest pause"], 0.55, color=[RED, GREEN])
    right.grid(axis="x", visible=False)
    label_bars(right, form="{:.2f}")
