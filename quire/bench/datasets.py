"""The requests of the benchmarks: random prompts, files of prompts, traces, and arrival times."""

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quire.messages.errors import error_text

Prompt = str | list[int]
Value = TypeVar("Value")

SAFE_VOCAB_SIZE = 1000  # ids below this exist in every vocabulary
TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
_WORDS: list[str] = TEXTS["words"].split()


@dataclass(frozen=True)
class BenchRequest:
    """prompt_len: tokens, possibly estimated; the server's count replaces it. arrival: seconds since the start."""

    prompt: Prompt
    prompt_len: int
    output_len: int
    arrival: float = 0.0


@dataclass
class RandomPrompts:
    """Random prompts of given lengths in tokens: token ids below vocab_size or, if that is None, English words.

    A prompt of w words has words_to_tokens · w + extra_tokens tokens. `calibrate` sets these two numbers.
    """

    rng: np.random.Generator
    vocab_size: int | None
    words_to_tokens: float = 1.0
    extra_tokens: float = 0.0

    def calibrate(self, words: tuple[int, int], tokens: tuple[int, int]) -> None:
        """Set words_to_tokens and extra_tokens from the server's token counts for two prompts of these numbers of
        words."""
        self.words_to_tokens = max((tokens[1] - tokens[0]) / (words[1] - words[0]), 0.1)
        self.extra_tokens = max(tokens[0] - self.words_to_tokens * words[0], 0.0)

    def make(self, length: int, *prefix: tuple[int, int]) -> Prompt:
        """Return a new prompt of `length` tokens. prefix: (seed, length) of reproducible parts at its beginning."""
        parts = [self._draw(np.random.default_rng(seed), size) for seed, size in prefix]
        ids = [token for part in [*parts, self._draw(self.rng, length - self.extra_tokens)] for token in part]
        return ids if self.vocab_size is not None else " ".join(_WORDS[i] for i in ids)

    def _draw(self, rng: np.random.Generator, length: float) -> list[int]:
        if self.vocab_size is not None:
            return [int(i) for i in rng.integers(min(3, self.vocab_size - 1), self.vocab_size, int(length))]
        return [int(i) for i in rng.integers(0, len(_WORDS), max(1, round(length / self.words_to_tokens)))]


def random_requests(
    prompts: RandomPrompts, count: int, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0
) -> list[BenchRequest]:
    """Return random requests with lengths uniform within ± range_ratio of the given lengths. All prompts begin with the
    same prefix of prefix_len additional tokens."""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio must be at least 0 and less than 1, got {range_ratio}")

    def lengths(length: int) -> list[int]:
        low = max(1, math.floor(length * (1 - range_ratio)))
        high = max(1, math.ceil(length * (1 + range_ratio)))
        return [int(n) for n in prompts.rng.integers(low, high + 1, count)]

    prefix = [(int(prompts.rng.integers(2**31)), prefix_len)] if prefix_len else []
    sizes = zip(lengths(input_len), lengths(output_len), strict=True)
    return [BenchRequest(prompts.make(n, *prefix), prefix_len + n, out) for n, out in sizes]


def prefix_repetition_requests(
    prompts: RandomPrompts, count: int, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int
) -> list[BenchRequest]:
    """Return requests in random order, with equally many prompts for each of num_prefixes prefixes."""
    seeds = prompts.rng.integers(2**31, size=num_prefixes)
    order = prompts.rng.permutation(np.arange(count) % num_prefixes)
    return [
        BenchRequest(prompts.make(suffix_len, (int(seeds[i]), prefix_len)), prefix_len + suffix_len, output_len)
        for i in order
    ]


def read_lines(path: Path, read: Callable[[Any], Value]) -> list[Value]:
    """Return the result of `read` for each JSON line of a file. Raises ValueError with the number of an invalid
    line."""
    values = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                values.append(read(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error_text(error)}") from error
    if not values:
        raise ValueError(f"{path} holds no requests")
    return values


def read_requests(path: Path, prompts: RandomPrompts, output_len: int, timed: bool) -> list[BenchRequest]:
    """Read a file of requests, with one JSON object per line. Raises ValueError with the number of an invalid line.

    The prompt is "prompt" (text or token ids), "prompt_token_ids", or "input_length" for a random prompt. "hash_ids"
    may give the beginning of a random prompt as blocks of 512 tokens, where equal ids mean equal tokens (Mooncake's
    traces). The output's length is "output_length", "output_tokens" or "max_tokens", or else `output_len`. If `timed`,
    the file is a trace: each object has "arrival" in seconds or "timestamp" in milliseconds, and the result is sorted
    by arrival, beginning at 0.
    """
    requests = read_lines(path, lambda fields: _request(fields, prompts, output_len, timed))
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [BenchRequest(r.prompt, r.prompt_len, r.output_len, r.arrival - first) for r in requests]


def _request(fields: Any, prompts: RandomPrompts, output_len: int, timed: bool) -> BenchRequest:
    if not isinstance(fields, dict):
        raise TypeError(f"must be a JSON object, got {fields!r}")
    arrival = 0.0
    if timed:
        if fields.keys().isdisjoint(("arrival", "timestamp")):
            raise ValueError('a trace needs "arrival" (seconds) or "timestamp" (milliseconds)')
        arrival = float(fields["arrival"]) if "arrival" in fields else fields["timestamp"] / 1000
    output_len = int(_first(fields, ("output_length", "output_tokens", "max_tokens")) or output_len)
    prompt = _first(fields, ("prompt", "prompt_token_ids"))
    if prompt is None:
        length = int(fields["input_length"]) if "input_length" in fields else 0
        if length < 1:
            raise ValueError('needs "prompt", "prompt_token_ids" or "input_length"')
        blocks = [(int(i), 512) for i in fields.get("hash_ids", ())][: (length - 1) // 512]
        return BenchRequest(prompts.make(length - 512 * len(blocks), *blocks), length, output_len, arrival)
    is_text = isinstance(prompt, str)
    if not prompt or not (is_text or (isinstance(prompt, list) and all(isinstance(i, int) for i in prompt))):
        raise ValueError("a prompt must be text or token ids, and not empty")
    return BenchRequest(prompt, len(prompt.split()) if is_text else len(prompt), output_len, arrival)


def _first(fields: dict[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if name in fields), None)


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Return the arrivals of `count` requests in seconds from the start, at `rate` per second; all at once if infinite.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less is more bursty. As in vLLM's
    benchmark, they are scaled so that the last request arrives at exactly count ÷ rate: the offered load then does not
    depend on the random numbers. Raises ValueError for a rate or burstiness that is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request rate and burstiness must be positive, got {rate} and {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))
    return [float(t) for t in times * (count / rate / times[-1])]


def ramp_up_times(
    count: int, strategy: str, start: float, end: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Return the arrivals for a rate that grows from `start` to `end` requests per second during the run. With each
    request, it grows by the same amount ("linear") or factor ("exponential"). Raises ValueError for rates that are not
    positive.
    """
    if not 0 < start <= end or not math.isfinite(end) or not burstiness > 0:
        raise ValueError(
            "--ramp-up-start-rps must be positive and at most --ramp-up-end-rps, and --burstiness "
            f"positive; got {start}, {end} and {burstiness}"
        )
    rates = np.linspace(start, end, count) if strategy == "linear" else np.geomspace(start, end, count)
    return [float(t) for t in np.cumsum(rng.gamma(burstiness, 1 / (rates * burstiness)))]
