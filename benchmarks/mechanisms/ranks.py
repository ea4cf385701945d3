"""Several ranks: the bytes they send, the work they do, and the time they wait. Computed with the engine's real
schedulers, routers and formulas; no ranks are started.
"""

from __future__ import annotations

import random
from typing import Any

from matplotlib.figure import Figure

from benchmarks.bytes_of_axes import BYTES, MODELS, Axes, Sent, boundary, expected_exchange, layer
from benchmarks.context_parallel import seen_pairs, sent_by_heads, sent_by_ring
from benchmarks.mechanisms.plot import BLUE, GREEN, GREY, ORANGE, axes, label_bars
from benchmarks.pipeline_idle import CPU, idle_shares
from benchmarks.pipeline_idle import MODELS as TIMES
from quire.engine.router import Router, token_pieces
from quire.kv.specs import attention_spec
from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MoESpec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput
from quire.models.registry import spec_of
from quire.parallel.experts import balanced_slots, loads_of_ranks
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

RANKS = (1, 2, 4, 8)


def measure_tensor_parallelism() -> Any:
    """Compute the bytes that a rank stores and sends per token for Llama-3.1-8B in bfloat16, by the number of ranks."""
    config = MODELS["Llama-3.1-8B"]
    spec = spec_of(config)
    hidden, inner, heads, kv_heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = hidden // heads
    of_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    weights = spec.num_layers * of_layer + 2 * config["vocab_size"] * hidden
    mixer = spec.mixers[0]
    assert isinstance(mixer, AttentionSpec)

    def kib(sent: Sent) -> float:
        return sent.values * BYTES / 1024

    four = {
        "tensor": kib(layer(spec, 0, Axes(4)) * spec.num_layers),
        "pipeline": kib(boundary(spec, Axes(pp=4))),
        "context, ring": sent_by_ring(1, 4, 4, heads, dim, dim) / 4 * spec.num_layers / 1024,
        "context, heads": sent_by_heads(1, 4, 4, heads, kv_heads, dim) / 4 * spec.num_layers / 1024,
        "data": 0.0,
    }
    return {
        "ranks": RANKS,
        "weights": [BYTES * weights / ranks for ranks in RANKS],
        "sent": [kib(layer(spec, 0, Axes(ranks)) * spec.num_layers) for ranks in RANKS],
        "four ranks": four,
    }


def draw_tensor_parallelism(data: Any, figure: Figure) -> None:
    names = [str(ranks) for ranks in data["ranks"]]
    left = axes(figure, "tensor-parallel ranks", "GB of weights on a rank", place=(1, 3, 1))
    left.bar(names, [size / 1e9 for size in data["weights"]], 0.6)
    label_bars(left, form="{:.1f}")
    middle = axes(figure, "tensor-parallel ranks", "KiB that a rank sends for a token", place=(1, 3, 2))
    middle.bar(names, data["sent"], 0.6, color=ORANGE)
    label_bars(middle)
    right = axes(figure, "KiB for a token, 4 ranks", "", place=(1, 3, 3))
    right.barh(list(data["four ranks"]), list(data["four ranks"].values()), 0.6, color=GREEN)
    label_bars(right)
    right.invert_yaxis()
    right.set_xlim(0, 1.25 * max(data["four ranks"].values()))
    for part in (left, middle):
        part.grid(axis="x", visible=False)
    right.grid(axis="y", visible=False)


def measure_pipeline_parallelism() -> Any:
    """Simulate the share of time in which stages are idle, by the number of steps in flight (see pipeline_idle.py)."""
    found: dict[str, Any] = {"depths": list(range(1, 7)), "idle": {}}
    for title, times, streams, budget in (("8B on H100s", TIMES["8B"], 128, 8192), ("1B on processors", CPU, 32, 2048)):
        shares = []
        for depth in found["depths"]:
            idle, _, _ = idle_shares(4, times, streams, 300, budget, depth)
            shares.append(sum(idle) / len(idle))
        found["idle"][title] = shares
    return found


def draw_pipeline_parallelism(data: Any, figure: Figure) -> None:
    part = axes(figure, "steps in flight", "time in which a stage is idle, %")
    for (name, shares), color, shift in zip(data["idle"].items(), (BLUE, ORANGE), (-0.2, 0.2), strict=True):
        part.bar([d + shift for d in data["depths"]], [100 * max(0, s) for s in shares], 0.4, color=color, label=name)
    label_bars(part, form="{:.0f}")
    part.axvline(4.5, color=GREY, linestyle=":")
    part.legend(title="four stages")
    part.grid(axis="x", visible=False)


def measure_data_parallelism() -> Any:
    """Run 60 conversations of 5 turns on four replicas. Returns the tokens found in their caches, and their loads."""
    found = {}
    for policy in ("load", "prefix"):
        draw = random.Random(3)
        router: Router[EngineCoreRequest] = Router(4, token_pieces if policy == "prefix" else None)
        limits = SchedulerLimits(16, 2048, 4096)
        cores = [Scheduler(limits, 2000, [attention_spec([0])], 16) for _ in range(4)]
        received = [0] * 4
        counts = [0] * 4
        widest = 0
        texts = [[draw.randrange(4000) for _ in range(draw.randrange(200, 600))] for _ in range(60)]
        arrivals = [(turn, conversation) for turn in range(5) for conversation in draw.sample(range(60), 60)]
        number = 0
        while arrivals or any(core.requests for core in cores):
            for _ in range(min(2, len(arrivals))):
                _, conversation = arrivals.pop(0)
                text = texts[conversation]
                text += [draw.randrange(4000) for _ in range(40)]
                output = draw.randrange(10, 60)
                request = EngineCoreRequest(
                    str(number), list(text), SamplingParams(max_tokens=output), seed=0, max_tokens=output
                )
                number += 1
                core = router.route(request, range(4))
                cores[core].add(request)
                received[core] += 1
                counts[core] += 1
            for index, core in enumerate(cores):
                step = core.schedule()
                if step.rows:
                    sampled = [
                        [9] if r.num_retired_tokens + count == len(r.token_ids) else []
                        for r, count in zip(core._submitted[0][1], step.num_tokens, strict=True)
                    ]
                    core.update(ModelRunnerOutput(step.step_id, sampled))
                waiting = len(core.requests) - len(core.running)
                router.report(index, waiting, len(core.running), received[index])
            loads = [len(core.requests) for core in cores]
            widest = max(widest, max(loads) - min(loads))
        found[policy] = {
            "requests": counts,
            "spread": widest,
            "computed": sum(core.stats.computed_tokens for core in cores),
            "known": sum(core.stats.prefix_queries for core in cores),
            "hits": [c.stats.prefix_hits for c in cores],
        }
    return found


def draw_data_parallelism(data: Any, figure: Figure) -> None:
    left = axes(figure, "", "prompt tokens found in a cache, %", place=(1, 2, 1))
    names = ["--data-parallel-routing\nload", "--data-parallel-routing\nprefix"]
    left.bar(names, [100 * sum(found["hits"]) / found["known"] for found in data.values()], 0.55, color=[GREY, BLUE])
    label_bars(left, form="{:.0f} %")
    left.grid(axis="x", visible=False)
    right = axes(figure, "replica", "requests", place=(1, 2, 2))
    for (name, found), color, shift in zip(data.items(), (GREY, BLUE), (-0.2, 0.2), strict=True):
        right.bar([r + shift for r in range(4)], found["requests"], 0.4, color=color, label=name)
    label_bars(right)
    right.set_xticks(range(4))
    right.set_ylim(0, 110)
    right.legend(ncols=2)


def measure_expert_parallelism() -> Any:
    """Compute the load of the most loaded of 8 ranks, relative to the mean. The loads of the 64 experts are a shuffled
    1 / n sequence."""
    draw = random.Random(4)
    loads = [1 / (place + 3) for place in range(64)]
    draw.shuffle(loads)
    found = []
    for redundant in (None, 0, 8, 16, 32):
        slots = [slot % 64 for slot in range(64 + (redundant or 0))]
        placed = slots if redundant is None else balanced_slots(loads, slots, 8)
        of_ranks = loads_of_ranks(loads, placed, 8)
        found.append({"redundant": redundant, "ranks": [8 * load / sum(of_ranks) for load in of_ranks]})
    spec = spec_of(MODELS["Qwen3-30B-A3B"])
    mlp = spec.mlps[0]
    assert isinstance(mlp, MoESpec)
    layers = sum(isinstance(m, MoESpec) for m in spec.mlps)
    sent = [
        [
            expected_exchange(mlp, spec.hidden_size, ranks).values * layers * BYTES / 1024 if ranks > 1 else 0
            for ranks in (2, 4, 8, 16)
        ],
        [(layer(spec, 0, Axes(ranks)) * spec.num_layers).values * BYTES / 1024 for ranks in (2, 4, 8, 16)],
    ]
    return {"balance": found, "ranks": [2, 4, 8, 16], "sent": sent}


def draw_expert_parallelism(data: Any, figure: Figure) -> None:
    left = axes(figure, "rank", "load, 1 is the mean", place=(1, 2, 1))
    shown = [data["balance"][0], data["balance"][1], data["balance"][3]]
    labels = ["in the order of the experts", "--enable-eplb", "and 16 second copies"]
    for place, (row, label, color) in enumerate(zip(shown, labels, (GREY, ORANGE, BLUE), strict=True)):
        left.bar([r + 0.27 * (place - 1) for r in range(8)], row["ranks"], 0.27, label=label, color=color)
    left.set_ylim(0, 3.4)
    left.set_xticks(range(8))
    left.legend()
    right = axes(figure, "replicas or ranks", "KiB sent for a token", place=(1, 2, 2))
    for values, label, color in zip(data["sent"], ("experts: exchanged", "tensor: summed"), (BLUE, GREY), strict=True):
        right.plot(data["ranks"], values, "o-", color=color, label=label)
    right.set_xscale("log", base=2)
    right.set_xticks(data["ranks"], [str(ranks) for ranks in data["ranks"]])
    right.set_ylim(0)
    right.legend(title="Qwen3-30B-A3B")


def measure_context_parallelism() -> Any:
    """Count the query-key pairs that each of four ranks computes for a chunk of 1,024 tokens at positions 0 and
    3,072."""
    found = {}
    for first in (0, 3072):
        stripes = [seen_pairs(first, 1024, 4, rank) for rank in range(4)]
        runs = [seen_pairs(first + 256 * rank, 256) for rank in range(4)]
        found[str(first)] = {"stripes": stripes, "runs": runs}
    return found


def draw_context_parallelism(data: Any, figure: Figure) -> None:
    for place, (first, found) in enumerate(data.items(), 1):
        label = "thousands of pairs" if place == 1 else ""
        part = axes(figure, "rank", label, f"1,024 tokens behind {int(first):,}", (1, 2, place))
        for shift, name, color in ((-0.2, "runs", GREY), (0.2, "stripes", BLUE)):
            text = "256 tokens in a row for each rank" if name == "runs" else "every fourth token"
            part.bar(
                [r + shift for r in range(4)], [pairs / 1000 for pairs in found[name]], 0.4, color=color, label=text
            )
        part.set_xticks(range(4))
        part.set_ylim(0, 1.4 * max(found["runs"]) / 1000)
        part.legend(loc="upper left", fontsize=8.5)


def draw_dual_batch_overlap(data: Any, figure: Figure) -> None:
    part = axes(figure, "ms of the link, beside 806 ms of computing", "ms for a step")
    places = range(len(data["link"]))
    for shift, name, label, color in (
        (-0.27, "whole", "whole steps: compute, then wait", GREY),
        (0.0, "halves", "two halves by turns", BLUE),
        (0.27, "longer side", "the longer side alone", GREEN),
    ):
        values = [max(806, link) for link in data["link"]] if name == "longer side" else data[name]
        part.bar([x + shift for x in places], values, 0.27, color=color, label=label)
    part.set_xticks(places, [str(link) for link in data["link"]])
    part.legend(loc="upper left")
    part.grid(axis="x", visible=False)
