"""The traffic of a plan: when requests arrive, how long they are, and which prompts share prefixes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.datasets import arrival_times, read_lines

PIECE = 512  # tokens per piece that prompts may share, as in Mooncake's traces
_CHARACTERS = 4 * PIECE  # characters per piece of text: English has about four per token
_DEFAULT_REQUESTS = 1000
_LENGTHS = ("output_length", "output_tokens", "max_tokens", "max_completion_tokens")
_SHORT = {
    "rate": 1.0,
    "input": None,
    "output": None,
    "requests": _DEFAULT_REQUESTS,
    "spread": 0.0,
    "burstiness": 1.0,
    "prefix": 0,
    "prefixes": 1,
    "seed": 0,
}


@dataclass(frozen=True)
class Arrival:
    """A request. time: seconds since the start. prompt, output: tokens. pieces: numbers of the pieces of PIECE tokens
    at the start of the prompt; equal numbers mean equal tokens."""

    time: float
    prompt: int
    output: int
    pieces: tuple[int, ...] = ()

    def tokens(self, number: int) -> list[int]:
        """Return the prompt's tokens. number: the request's unique number."""
        rest = [-1 - number] * (self.prompt - PIECE * len(self.pieces))
        return [token for piece in self.pieces for token in [piece] * PIECE] + rest if self.pieces else rest


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival."""

    arrivals: Sequence[Arrival]

    @property
    def rate(self) -> float:
        """Return the requests per second. Infinite if all arrive at once."""
        last = self.arrivals[-1].time
        return len(self.arrivals) / last if last > 0 else math.inf

    @property
    def longest(self) -> int:
        return max(arrival.prompt + arrival.output for arrival in self.arrivals)

    @property
    def has_prefixes(self) -> bool:
        return any(arrival.pieces for arrival in self.arrivals)

    def at_rate(self, rate: float) -> Traffic:
        """Return the same requests at a rate per second. The gaps between them keep their proportions."""
        return self.faster(rate / self.rate)

    def faster(self, factor: float) -> Traffic:
        return Traffic([replace(arrival, time=arrival.time / factor) for arrival in self.arrivals])

    def first(self, count: int) -> Traffic:
        return Traffic(self.arrivals[:count])


def read_traffic(text: str) -> Traffic:
    """Parse `--traffic`: a file, or a description like "rate=10,input=1024,output=256". A file may be followed by
    ",rate=10", which replaces its times. Raises ValueError and OSError."""
    name, _, options = text.partition(",")
    if "=" in name:
        return _generated(text)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"traffic={text!r} must be a file of requests, or a description such as "
            f"rate=10,input=1024,output=256; there is no file {name}"
        )
    fields = _fields(options, ("rate", "burstiness", "seed", "requests"), text) if options else {}
    arrivals = read_lines(path, _arrival)
    if "requests" in fields:
        arrivals = arrivals[: int(fields["requests"])]
    if "rate" in fields:
        return Traffic(_at_times(arrivals, fields))
    if any(math.isnan(arrival.time) for arrival in arrivals):
        raise ValueError(
            f'traffic={text!r}: a request has no "arrival" (seconds) and no "timestamp" (milliseconds); '
            f"give a rate: --traffic {name},rate=10"
        )
    arrivals.sort(key=lambda arrival: arrival.time)
    first = arrivals[0].time
    return Traffic([replace(arrival, time=arrival.time - first) for arrival in arrivals])


def _generated(text: str) -> Traffic:
    fields = _fields(text, tuple(_SHORT), text)
    for name in ("input", "output"):
        if name not in fields:
            raise ValueError(f"traffic={text!r} needs {name}=TOKENS")
    values = {**_SHORT, **fields}
    count = int(values["requests"])
    spread = values["spread"]
    prefix = int(values["prefix"])
    if not 0 <= spread < 1:
        raise ValueError(f"traffic={text!r}: spread must be at least 0 and less than 1")
    rng = np.random.default_rng(int(values["seed"]))

    def lengths(mean: float) -> list[int]:
        low = max(1, math.floor(mean * (1 - spread)))
        high = max(1, math.ceil(mean * (1 + spread)))
        return [int(n) for n in rng.integers(low, high + 1, count)]

    pieces = -(-prefix // PIECE)
    prefixes = rng.integers(0, int(values["prefixes"]), count)
    arrivals = [
        Arrival(0.0, PIECE * pieces + prompt, output, tuple(1 + int(number) * pieces + i for i in range(pieces)))
        for prompt, output, number in zip(lengths(values["input"]), lengths(values["output"]), prefixes, strict=True)
    ]
    return Traffic(_at_times(arrivals, values))


def _fields(text: str, names: Sequence[str], whole: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?|inf)\s*", part)
        if match is None or match[1] not in names or match[1] in fields:
            raise ValueError(
                f"traffic={whole!r}: {part.strip()!r} must be one of {', '.join(names)}, each once and "
                "with a number, such as rate=10"
            )
        fields[match[1]] = float(match[2])
        if match[1] in ("requests", "input", "output", "prefixes") and not 1 <= fields[match[1]] < math.inf:
            raise ValueError(f"traffic={whole!r}: {match[1]} must be at least 1")
    return fields


def _at_times(arrivals: Sequence[Arrival], fields: dict[str, Any]) -> list[Arrival]:
    rng = np.random.default_rng(int(fields.get("seed", 0)))
    times = arrival_times(len(arrivals), fields["rate"], fields.get("burstiness", 1.0), rng)
    return [replace(arrival, time=time) for arrival, time in zip(arrivals, times, strict=True)]


def _arrival(fields: Any) -> Arrival:
    """Parse a line of a file, with the fields of quire bench serve's traces (quire/bench/datasets.py)."""
    if not isinstance(fields, dict):
        raise TypeError(f"must be a JSON object, got {fields!r}")
    time = math.nan
    if "arrival" in fields:
        time = float(fields["arrival"])
    elif "timestamp" in fields:
        time = float(fields["timestamp"]) / 1000
    output = next((int(fields[name]) for name in _LENGTHS if fields.get(name)), 0)
    if output < 1:
        raise ValueError(f"needs the number of output tokens, as {', '.join(map(repr, _LENGTHS))}")
    prompt = fields.get("prompt")
    ids = fields.get("prompt_token_ids")
    if isinstance(prompt, list):
        prompt, ids = None, prompt
    if isinstance(prompt, str) and prompt:
        whole = range(0, len(prompt) - _CHARACTERS, _CHARACTERS)  # the last token is always computed
        pieces = [hash(prompt[start : start + _CHARACTERS]) for start in whole]
        return Arrival(time, max(PIECE * len(pieces) + 1, -(-len(prompt) // 4)), output, _numbers(pieces))
    if isinstance(ids, list) and ids:
        starts = range(0, len(ids) - PIECE, PIECE)
        return Arrival(time, len(ids), output, _numbers([hash(tuple(ids[i : i + PIECE])) for i in starts]))
    length = int(fields.get("input_length") or fields.get("prompt_tokens") or 0)
    if length < 1:
        raise ValueError('needs "input_length", "prompt" or "prompt_token_ids"')
    return Arrival(time, length, output, _numbers(fields.get("hash_ids", ()))[: (length - 1) // PIECE])


def _numbers(pieces: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(piece) % (1 << 31) for piece in pieces)
