"""Displays an engine in a terminal: lines that fit its width and height."""

import time
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.text import Text

from quire.cli.watch.feed import Feed
from quire.cli.watch.picture import STATIONS, Picture
from quire.observability.logging import printable

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_NAME = 12  # columns of the names at the left
_COLOURS = dict(zip(STATIONS, ("yellow", "cyan", "magenta", "green", "blue"), strict=True))
_OF_STATES = {"running": "green", "waiting": "yellow", "preempted": "red", "gated": "magenta"}
# Of the map of blocks: free, only cached, used by one request, shared by several.
_BLOCKS = {"0": ("·", "bright_black"), "1": ("▒", "blue"), "2": ("█", "green")}
_SHARED = ("█", "magenta")
_MAP_LINES = 2


def draw(feed: Feed, url: str, width: int, height: int) -> Text:
    """Return the screen. Hold the feed's lock."""
    picture = feed.picture
    state = feed.problem or (picture.state if picture is not None else "")
    lines = [_head(feed.title, url, "lost" if feed.problem and picture is not None else state, width)]
    if picture is None:
        lines += [Text(), Text(f"Waiting for {url}: {feed.problem}")]
    else:
        dim = "dim" if feed.problem else ""
        if feed.problem:
            seconds = int(time.monotonic() - feed.lost_at)
            lines.append(Text(f"Lost {seconds} s ago: {feed.problem}. Trying again.", style="bold red"))
        below = [_line(name, Text(text)) for name, text in picture.others.items()]
        below += _details(picture, width) if picture.has_details else _no_details()
        for line in [*_numbers(picture, width), *below]:
            line.stylize(dim)
            lines.append(line)
        if picture.has_details:
            table = _requests(picture.requests, width, height - len(lines) - 1)
            for line in table:
                line.stylize(dim)
            lines += table
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(Text("q leaves", style="dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _head(title: str, url: str, state: str, width: int) -> Text:
    left = f"{title}, {url}" if title else url
    right = f" {state} "
    left = left[: max(width - len(right) - 1, 0)]
    colour = "green" if state == "ready" else "red" if state in ("lost", "dead") else "yellow"
    return Text.assemble((left, "bold"), " " * max(width - len(left) - len(right), 1), (right, f"black on {colour}"))


def _line(name: str, *parts: "Text | str | tuple[str, str]") -> Text:
    return Text.assemble((f"{name:<{_NAME}}", "bold"), *parts)


def _numbers(picture: Picture, width: int) -> Iterable[Text]:
    preempted = f"   {picture.preemptions:,} preemptions" if picture.preemptions else ""
    restarts = f"   {picture.restarts} restarts" if picture.restarts else ""
    yield _line(
        "Requests",
        (f"{picture.running:,}", "bold green"),
        " running   ",
        (f"{picture.waiting:,}", "bold yellow"),
        f" waiting{preempted}{restarts}",
    )
    used = f"{100 * picture.kv_usage:5.1f} %"
    if picture.num_blocks:
        used += f" of {picture.num_blocks:,} blocks"
    space = max(width - _NAME - 30, 5)
    yield _line("KV cache", _bar(picture.kv_usage, space, "red" if picture.kv_usage > 0.95 else "green"), " ", used)
    if picture.hit_rate is None:
        yield _line("Prefixes", ("no prompts so far", "dim"))
    else:
        yield _line(
            "Prefixes", _bar(picture.hit_rate, space, "blue"), f" {100 * picture.hit_rate:5.1f} % of tokens cached"
        )
    for name, rates, colour in (("Output", picture.output, "green"), ("Prompts", picture.prompt, "blue")):
        curve = _curve(list(rates)[-max(width - _NAME - 22, 5) :])
        yield _line(name, f"{rates[-1] if rates else 0:9,.1f} tokens/s  ", (curve, colour))
    for name, times in (("First token", picture.first_token), ("Next tokens", picture.gaps)):
        yield _line(name, *(_times(times) if times else [("no requests lately", "dim")]))


def _times(times: Sequence[float]) -> Iterable[tuple[str, str]]:
    for share, value in zip(("50 %", "90 %", "99 %"), times, strict=False):
        yield f"{share} ", "dim"
        yield f"{f'{value:,.1f} ms' if value < 10_000 else f'{value / 1000:,.1f} s':<15}", ""


def _details(picture: Picture, width: int) -> Iterable[Text]:
    space = max(width - _NAME, 5)
    steps = list(picture.steps)
    yield _line("Steps", *_step_columns(steps[-space:]))
    if steps:
        recent = steps[-50:]
        mean = {name: sum(step.get("ms", {}).get(name, 0.0) for step in recent) / len(recent) for name in STATIONS}
        total = sum(mean.values())
        parts = [(f"{name} {value:.1f}  ", _COLOURS[name]) for name, value in mean.items()]
        yield _line("Step time", f"{total:.1f} ms: ", *parts)
        yield _line("Last step", _said(steps[-1]))
    else:
        yield _line("Step time", ("no steps so far", "dim"))
        yield _line("Last step")
    for number, row in enumerate(_map(picture.cells, space)):
        yield _line("" if number else "Blocks", *row)


def _no_details() -> Iterable[Text]:
    yield Text()
    yield Text(
        "The server's page is disabled, or it is not Quire's, so there are no steps and requests to show.", style="dim"
    )


def _said(step: dict[str, Any]) -> str:
    """Describe the tokens that a step has computed."""
    kinds = ("prompt", "cached", "decode", "accepted", "rejected")
    counts = ", ".join(f"{step[kind]:,} {kind}" for kind in kinds if step.get(kind))
    return f"{step['requests']} requests: {counts or 'nothing'} (tokens)"


def _step_columns(steps: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """A column for each step, with the number of tokens that it computed. Blue steps computed prompts, and green ones
    only generated tokens.

    Heights are square roots, since a chunk of a prompt may have a hundred times as many tokens as other steps.
    """
    sizes = [step.get("prompt", 0) + step.get("decode", 0) + step.get("accepted", 0) for step in steps]
    for step, height in zip(steps, _curve([size**0.5 for size in sizes]), strict=True):
        yield height, "blue" if step.get("prompt") else "green"


def _map(cells: str, space: int) -> Iterable[Sequence[tuple[str, str]]]:
    """Lines of the map of blocks. If there is less room than cells, each character shows the most used of its cells."""
    places = min(len(cells), space * _MAP_LINES)
    if not places:
        return [[("", "")]]
    bounds = [number * len(cells) // places for number in range(places + 1)]
    most = [max(cells[start:end]) for start, end in pairwise(bounds)]
    drawn = [_BLOCKS.get(state, _SHARED) for state in most]
    rows = (drawn[start : start + space] for start in range(0, places, space))
    return [[(look[0] * len(list(run)), look[1]) for look, run in groupby(row)] for row in rows]


def _requests(requests: Sequence[dict[str, Any]], width: int, lines: int) -> list[Text]:
    """Return a table of the requests with a line for each, as far as they fit."""
    if lines < 3:
        return []
    name_space = max(width - 62, 12)
    bar_space = 20
    table = [
        Text(),
        Text(
            f"{'Request':<{name_space}} {'State':<10}{'Computed of the most':<{bar_space + 14}}"
            f"{'Cached':>7}{'Preempted':>10}",
            style="bold underline",
        ),
    ]
    shown = requests if len(requests) <= lines - 2 else requests[: lines - 3]
    for request in shown:
        name = printable(request["id"], name_space)
        share = request["computed"] / max(request["most"], 1)
        counts = f"{request['computed']:,}/{request['most']:,}"
        table.append(
            Text.assemble(
                f"{name[:name_space]:<{name_space}} ",
                (f"{request['state']:<10}", _OF_STATES.get(request["state"], "")),
                _bar(share, bar_space, "green"),
                f" {counts:<13}",
                f"{request.get('cached', 0):>7,}{request.get('preemptions', 0):>10,}",
            )
        )
    if len(shown) < len(requests):
        table.append(Text(f"and {len(requests) - len(shown)} more", style="dim"))
    if not requests:
        table.append(Text("no requests", style="dim"))
    return table


def _bar(share: float, space: int, colour: str) -> Text:
    filled = round(min(max(share, 0.0), 1.0) * space)
    return Text.assemble(("━" * filled, colour), ("─" * (space - filled), "bright_black"))


def _curve(values: Sequence[float]) -> str:
    most = max(values, default=0) or 1
    return "".join(_HEIGHTS[max(round(8 * value / most), 1 if value > 0 else 0)] for value in values)
