"""A plan as text and as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from quire.bench.slo import METRICS, Limit
from quire.planner.plan import FACTORS, PERCENTILES, Cost, Load, Result, Task, best_of


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Return the rows as lines with columns of equal width."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def text(task: Task, results: Sequence[Result]) -> str:
    """Return the tables and the recommendation."""
    parts = [_memory_table(task, results)]
    if any(result.load for result in results):
        parts.append(_load_table(task, results))
    if any(result.breaking for result in results):
        parts.append(_breaking_table(task, results))
    return "\n\n".join([*parts, _advice(task, results)])


def memory_by_quantization(task: Task, results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return for each layout and quantization the weights of a rank and the tokens of a replica's KV cache."""
    kinds = task.footprint.quantizations if task.fitted is None else [task.quantization]
    if task.quantization not in kinds:
        kinds = [*kinds, task.quantization]
    rows = []
    for result in results:
        cells = [str(result.layout)]
        for quantization in kinds:
            memory = result.memory
            if quantization != task.quantization:
                memory = _with(task, quantization).memory(result.layout)
            tokens = f"{memory.tokens:,}" if memory.fits else "does not fit"
            cells += [size_text(memory.weights), tokens]
        rows.append(tuple(cells))
    return [("", *(cell for kind in kinds for cell in (f"{kind or 'as it is'}: weights", "tokens in KV cache"))), *rows]


def _with(task: Task, quantization: str | None) -> Task:
    fields = {name: getattr(task, name) for name in task.__dataclass_fields__}
    return Task(**{**fields, "quantization": quantization})


def _memory_table(task: Task, results: Sequence[Result]) -> str:
    head = f"What fits: weights of a rank, and tokens in the KV cache of a replica ({task.device.name}"
    head += f", requests of up to {task.options.max_model_len:,} tokens)"
    return f"{head}\n{table(memory_by_quantization(task, results))}"


def _load_table(task: Task, results: Sequence[Result]) -> str:
    rate = task.traffic.rate
    load = "all at once" if math.isinf(rate) else f"{rate:,.3g} requests a second"
    total = len(task.traffic.arrivals)
    columns = ["", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "E2E p50", "p99"]
    columns += ["output tokens/s", "good", "KV cache used"]
    rows = []
    for result in results:
        if (at := result.load) is None:
            continue
        p = at.latencies.percentiles
        cells = [duration(p[name][q]) for name in ("ttft", "itl") for q in PERCENTILES]
        cells += [duration(p["e2e"][q]) for q in (50.0, 99.0)]
        good = f"{at.latencies.good_share:.1%}" if task.limits else "-"
        rows.append((f"{result.layout}", *cells, f"{at.output_tokens_per_second:,.0f}", good, f"{at.usage:.0%}"))
    text = f"The traffic: {total:,} requests, {load}\n{table([tuple(columns), *rows])}"
    preempted = [
        f"{result.layout}: {result.load.preemptions:,}"
        for result in results
        if result.load is not None and result.load.preemptions
    ]
    return text + (f"\n  preempted for lack of KV cache: {'; '.join(preempted)}" if preempted else "")


def _breaking_table(task: Task, results: Sequence[Result]) -> str:
    limits = ", ".join(map(str, task.limits))
    head = ["", "requests/s", "output tokens/s", "limited by", "devices for the traffic"]
    if task.price is not None:
        head += ["$ a million output tokens", "of all tokens"]
    rows = [tuple(head)]
    for result in results:
        if (at := result.breaking) is None:
            continue
        needed = "-" if result.needed is None else f"{result.needed * result.layout.tp * result.layout.pp}"
        cells = [
            str(result.layout),
            f"{at.rate:,.3g}",
            f"{at.output_tokens_per_second:,.0f}",
            _limit_of(at, task),
            needed,
        ]
        if result.cost_at_breaking is not None:
            cost = result.cost_at_breaking
            cells += [f"{cost.per_million_output_tokens:.2f}", f"{cost.per_million_tokens:.2f}"]
        rows.append(tuple(cells))
    return f"The highest load that meets {limits}\n{table(rows)}"


def _limit_of(load: Load, task: Task) -> str:
    """Return the most heavily used resource at the highest load."""
    if load.rate > 0.99 * FACTORS[1] * task.traffic.rate:
        return "none up to here"

    def used(limit: Limit) -> float:
        return load.latencies.percentiles[limit.metric][limit.percentile] / limit.seconds

    return max(task.limits, key=used).metric.upper()


def _advice(task: Task, results: Sequence[Result]) -> str:
    best = best_of(results, task.limits)
    if best is None or best.load is None:
        smallest = min(results, key=lambda result: result.memory.weights)
        return (
            "Nothing fits. The smallest share of the weights is "
            + size_text(smallest.memory.weights)
            + f" a rank ({smallest.layout}), and a rank may use {size_text(smallest.memory.largest)}. Take more or "
            "larger devices, --quantization int8 or int4, or shorter requests (--max-model-len)."
        )
    flags = f" {best.layout.flags}" if best.layout.flags else ""
    lines = [f"Take {best.layout}" + (f" (quire serve{flags})" if task.fitted is None else "")]
    if task.limits:
        lines[0] += ": it meets the objectives" if best.load.met else ": no layout meets the objectives at this traffic"
        if best.breaking is not None:
            lines[0] += f", {'' if best.load.met else 'but it does '}up to {best.breaking.rate:,.3g} requests a second"
    lines[0] += "."
    if best.cost is not None:
        lines.append(_cost_text(best, best.cost))
    if task.fitted is None:
        lines.append(
            "Times are counted, not measured: docs/plan.md says from what, and how far published runs are off."
        )
    return "\n".join(lines)


def _cost_text(best: Result, cost: Cost) -> str:
    line = (
        f"At this traffic it costs ${cost.per_hour:,.2f} an hour, ${cost.per_million_output_tokens:,.2f} a million "
        f"output tokens, and ${cost.per_million_tokens:,.2f} a million tokens of both kinds"
    )
    if best.needed is not None and best.needed < best.layout.dp:
        one = best.layout.tp * best.layout.pp
        spared = best.needed * one
        line += f"; {spared} of the {best.layout.ranks} devices (-dp {best.needed}) are enough for it"
    return line + "."


def as_json(task: Task, results: Sequence[Result]) -> dict[str, Any]:
    """Return the whole plan as data, in bytes, seconds and requests per second."""
    best = best_of(results, task.limits)
    return {
        "device": task.device.name,
        "quantization": task.quantization,
        "options": asdict(task.options),
        "requests": len(task.traffic.arrivals),
        "rate": _finite(task.traffic.rate),
        "slo": [asdict(limit) for limit in task.limits],
        "price_per_device_hour": task.price,
        "best": None if best is None else best.layout.flags,
        "layouts": [_result_json(result) for result in results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "layout": {**asdict(result.layout), "flags": result.layout.flags},
        "fits": result.memory.fits,
        "memory": asdict(result.memory),
        "load": _load_json(result.load),
        "breaking": _load_json(result.breaking),
        "replicas_needed": result.needed,
        "cost": None if result.cost is None else asdict(result.cost),
        "cost_at_breaking": None if result.cost_at_breaking is None else asdict(result.cost_at_breaking),
    }


def _load_json(load: Load | None) -> dict[str, Any] | None:
    if load is None:
        return None
    fields = asdict(load)
    latencies = fields.pop("latencies")
    for name in METRICS:
        fields[name] = {f"p{p:g}": seconds for p, seconds in latencies["percentiles"][name].items()}
    return {**fields, "rate": _finite(load.rate), "good_share": load.latencies.good_share, "met": load.met}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def size_text(size: float) -> str:
    if size < 1e9:
        return f"{size / 1e6:.0f} MB"
    return f"{size / 1e9:.1f} GB" if size < 99.5e9 else f"{size / 1e9:,.0f} GB"


def duration(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
