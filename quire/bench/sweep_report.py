"""The report of a sweep: a table and the recommended flags."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from quire.bench.slo import Limit
from quire.bench.sweep import Point, describe, describe_load

_NAMES = {"e2e": "e2el"}  # metrics whose statistics have a different name in results
_COLUMNS = {
    "req/s": "request_throughput",
    "out tok/s": "output_throughput",
    "TTFT p50": "p50_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "ITL p50": "p50_itl_ms",
    "ITL p99": "p99_itl_ms",
}
_AS_GOOD = 0.97  # of the best throughput: smaller differences are noise


@dataclass(frozen=True)
class Row:
    """A server's options under a load. result: the medians of all runs. number: the row's number in the table, from
    1."""

    number: int
    options: dict[str, Any]
    load: dict[str, Any]
    result: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class Choice:
    """The best row. share: its latency as a share of the tightest limit; above 1, no row meets the objectives."""

    row: Row
    share: float

    @property
    def meets(self) -> bool:
        return self.share <= 1


def rows_of(points: Sequence[Point]) -> list[Row]:
    """Return one row for all runs of the same options and load, in the order of the points."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(json.dumps([point.options, point.load], sort_keys=True), []).append(point)
    rows = []
    for number, group in enumerate(groups.values(), 1):
        done = [point.result for point in group if point.result]
        names = done[0] if done else ()
        result = {name: _median([r[name] for r in done if r.get(name) is not None]) for name in names}
        problem = "" if done else group[0].problem
        rows.append(Row(number, group[0].options, group[0].load, result, problem))
    return rows


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def key(limit: Limit) -> str:
    """Return the statistic's name in the result of `quire bench serve`."""
    return f"p{limit.percentile:g}_{_NAMES.get(limit.metric, limit.metric)}_ms"


def share(limit: Limit, result: Mapping[str, Any]) -> float:
    """Return the measured value as a share of the limit."""
    value = result.get(key(limit))
    return float("inf") if value is None else float(value) / 1000 / limit.seconds


def worst_share(slo: Sequence[Limit], result: Mapping[str, Any]) -> float:
    """Return the share of the tightest limit. Infinite if requests failed."""
    if slo and result.get("failed"):
        return float("inf")
    return max((share(limit, result) for limit in slo), default=0.0)


def choose(rows: Sequence[Row], slo: Sequence[Limit]) -> Choice | None:
    """Return the best row: among the rows that meet the objectives, the one with the highest output throughput. Among
    rows that are nearly as fast, choose the one farthest from its limits or, without objectives, the one with the
    shortest ITL. If no row meets the objectives, choose the one that misses them least. None if nothing was
    measured."""
    done = [row for row in rows if row.result]
    if not done:
        return None
    good = [row for row in done if worst_share(slo, row.result) <= 1]
    if not good:
        row = min(done, key=lambda row: worst_share(slo, row.result))
        return Choice(row, worst_share(slo, row.result))
    best = max(row.result["output_throughput"] for row in good)
    close = [row for row in good if row.result["output_throughput"] >= _AS_GOOD * best]
    row = min(close, key=lambda row: worst_share(slo, row.result) if slo else row.result["p99_itl_ms"] or 0.0)
    return Choice(row, worst_share(slo, row.result))


def command(model: str | None, options: Mapping[str, Any]) -> str:
    """Return the command line that serves the model with options."""
    parts = ["quire", "serve", *([] if model is None else [model])]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list):
            parts += [flag, *map(str, value)]
        elif value is not None:
            parts += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join(parts)


def table(rows: Sequence[Row], slo: Sequence[Limit], choice: Choice | None) -> str:
    """Return a line for each row. The recommended row is marked."""
    names = list(dict.fromkeys(name for row in rows for name in row.options))
    columns = _COLUMNS | {f"{limit.metric.upper()} p{limit.percentile:g}": key(limit) for limit in slo}
    head = ["", *names, "load", *columns, *(["SLO"] * bool(slo))]
    lines = [head]
    for row in rows:
        mark = "*" if choice is not None and row is choice.row else " "
        cells = [f"{mark}{row.number}", *(_plain(row.options.get(name)) for name in names), describe_load(row.load)]
        if row.result:
            cells += [_number(row.result.get(name)) for name in columns.values()]
            cells += ["met" if worst_share(slo, row.result) <= 1 else "missed"] * bool(slo)
        else:
            cells.append(f"failed: {row.problem[:100]}" if row.problem else "not measured")
        lines.append(cells)
    width = [max((len(line[i]) for line in lines if len(line) == len(head)), default=0) for i in range(len(head))]
    text = len(names) + 2  # text columns, which are left-aligned
    return "\n".join(
        "  ".join(
            cell.ljust(width[i]) if i < text or len(line) < len(head) else cell.rjust(width[i])
            for i, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def advice(choice: Choice | None, slo: Sequence[Limit], model: str | None, options: Mapping[str, Any]) -> str:
    """Return the recommendation as text. options: of all servers."""
    if choice is None:
        return "Nothing was measured, so nothing can be recommended."
    row = choice.row
    goals = ", ".join(map(str, slo))
    line = command(model, {**{k: v for k, v in options.items() if k != "hf_token"}, **row.options})
    if slo and not choice.meets:
        return (
            f"No row meets {goals}. Row {row.number} is the closest: it takes {choice.share:.2f} times the "
            f"tightest limit. Lower the load, or relax the limits.\n\n    {line}"
        )
    reason = f"the highest output throughput that meets {goals}" if slo else "the highest output throughput"
    used = f", using {100 * choice.share:.0f} % of the tightest limit" if slo else ""
    return f"Recommended (row {row.number}), {describe_load(row.load)}: {reason}{used}\n\n    {line}"


def record(rows: Sequence[Row], slo: Sequence[Limit], choice: Choice | None, **facts: Any) -> dict[str, Any]:
    """Return all results as data, for programs."""
    listed = [
        {
            "number": row.number,
            "options": row.options,
            "load": row.load,
            "problem": row.problem,
            "meets_slo": bool(row.result) and worst_share(slo, row.result) <= 1,
            "result": row.result,
        }
        for row in rows
    ]
    recommended = (
        None
        if choice is None
        else {
            "number": choice.row.number,
            "options": choice.row.options,
            "meets_slo": choice.meets,
            "share_of_tightest_limit": choice.share,
        }
    )
    limits = [{"metric": li.metric, "percentile": li.percentile, "seconds": li.seconds} for li in slo]
    return {**facts, "slo": limits, "recommended": recommended, "rows": listed}


def title(row: Row) -> str:
    return f"{row.number}: {describe(row.options)}"


def _plain(value: Any) -> str:
    return "none" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
