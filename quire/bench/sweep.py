"""`quire bench sweep`: measures servers with different options under different loads.

A point is an engine's options and a load. Each measured point is written to results.jsonl at once. Points that are
already in the file are skipped, so running the same command again continues an interrupted sweep.
"""

import argparse
import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire._version import __version__
from quire.bench import report, serve
from quire.bench.datasets import RandomPrompts, arrival_times
from quire.bench.flags import make_requests
from quire.bench.server_process import ServerFailedError, ServerProcess
from quire.config.engine import GROUPS, OPTIONS, ConfigError, canonical_name, read_option
from quire.config.vllm import unknown
from quire.messages.errors import error_text

RESULTS = "results.jsonl"
USUAL_VALUES: dict[str, list[Any]] = {  # the default of a sweep without --vary
    "max_num_batched_tokens": [256, 512, 1024],
    "max_num_seqs": [16, 64],
    "quantization": [None, "int8"],
}
_ENGINE = {name for config in GROUPS.values() for name in OPTIONS[config]}
_LOAD = ("request_rate", "max_concurrency")
_WORKLOAD = """dataset_name dataset_path num_prompts input_len output_len random_input_len random_output_len
    random_prefix_len random_range_ratio prefix_repetition_prefix_len prefix_repetition_suffix_len
    prefix_repetition_num_prefixes prefix_repetition_output_len custom_output_len burstiness seed num_warmups""".split()
_PERCENTILES = {50.0, 75.0, 90.0, 95.0, 99.0, 99.9}


class Point(msgspec.Struct):
    """One measurement. options: the varied engine options. load: request_rate (None: all at once), max_concurrency
    (None: unlimited), and other varied request options. run: the run's number, if there are several. key: identifies
    the point across sweeps. result: as from `quire bench serve`. problem: why there is no result."""

    options: dict[str, Any]
    load: dict[str, Any]
    run: int = 0
    key: str = ""
    result: dict[str, Any] = {}
    problem: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.problem)


@dataclass(frozen=True)
class Sweep:
    """model, options: shared by all servers. arguments: the command's other flags. folder: for results and logs."""

    model: str | None
    options: Mapping[str, Any]
    arguments: argparse.Namespace
    folder: Path
    percentiles: Sequence[float] = ()

    @property
    def points(self) -> list[Point]:
        """Return all points, grouped by server. Raises ValueError for unknown options and loads."""
        a = self.arguments
        workload = {name: str(getattr(a, name)) for name in _WORKLOAD if getattr(a, name) is not None}
        rest = {
            "model": self.model,
            "options": dict(self.options),
            "workload": workload,
            "version": __version__,
            "more": sorted({*self.percentiles} - _PERCENTILES),
        }
        points = []
        for options, load, run in product(engine_variants(a), loads(a), range(a.num_runs)):
            point = Point(options, load, run)
            described = json.dumps([rest, options, load, run], sort_keys=True, default=str)
            point.key = hashlib.sha256(described.encode()).hexdigest()[:16]
            points.append(point)
        return points

    def measured(self, points: Sequence[Point]) -> dict[str, Point]:
        """Return by key the points that are in results.jsonl and did not fail."""
        file = self.folder / RESULTS
        keys = {point.key for point in points}
        if not file.is_file():
            return {}
        found = {}
        for line in file.read_bytes().splitlines():
            try:
                point = msgspec.json.decode(line, type=Point)
            except msgspec.DecodeError:  # cut off when the machine was switched off
                continue
            if point.key in keys and not point.failed:
                found[point.key] = point
        return found

    def run(self, points: Sequence[Point], tell: Callable[[str], None], done: Callable[[Point], None]) -> None:
        """Measure points, and write each to results.jsonl. tell: receives progress messages."""
        number = 0
        for group in _by_options(points):
            while (files := self.folder / f"server-{number}").with_suffix(".log").exists():
                number += 1
            for point in self._measure_server(group, files, tell):
                with (self.folder / RESULTS).open("ab") as file:
                    file.write(msgspec.json.encode(point) + b"\n")
                done(point)

    def _measure_server(self, group: Sequence[Point], files: Path, tell: Callable[[str], None]) -> Iterator[Point]:
        """Yield the points with their results. If the server does not start, all of them fail."""
        named = {**self.options, **group[0].options}
        options = {name: value for name, value in named.items() if value is not None}
        if self.model is not None:
            options["model"] = self.model
        tell(f"starting: {describe(group[0].options)}")
        with ServerProcess(options, files) as server:
            try:
                url = server.start(self.arguments.server_ready_timeout)
            except ServerFailedError as error:
                for point in group:
                    point.problem = error_text(error)
                    yield point
                return
            for point in group:
                tell(f"{describe(point.options)}, {describe_load(point.load)}")
                try:
                    point.result = asyncio.run(_measure(self._arguments_of(point), url, self.percentiles))
                except OSError as error:
                    point.problem = error_text(error)
                if point.result and not point.result["completed"]:
                    point.result, point.problem = {}, f"all requests failed; see {files.with_suffix('.log')}"
                yield point

    def _arguments_of(self, point: Point) -> argparse.Namespace:
        values = {**vars(self.arguments), **point.load}
        values["seed"] = self.arguments.seed + point.run
        return argparse.Namespace(**values)


async def _measure(a: argparse.Namespace, url: str, percentiles: Sequence[float]) -> dict[str, Any]:
    """Return the result of one load."""
    rng = np.random.default_rng(a.seed)
    async with serve.Target(url, "/v1/completions", None, {}, {"ignore_eos": True}) as target:
        await target.find_model()
        prompts = RandomPrompts(rng, None)
        await target.find_prompts(prompts)
        requests = make_requests(a, prompts)
        rate = float("inf") if a.request_rate is None else a.request_rate
        times = arrival_times(len(requests), rate, a.burstiness, rng)
        warmups = [replace(r, prompt=prompts.make(max(r.prompt_len, 1))) for r in requests[: a.num_warmups]]
        await serve.drive(target, warmups, [0.0] * len(warmups), a.max_concurrency)
        await target.order("/reset_prefix_cache")
        outcomes, duration = await serve.drive(target, requests, times, a.max_concurrency)
    wanted = sorted(_PERCENTILES.union(percentiles))
    return report.summarize(outcomes, duration, list(report.METRICS), wanted, {})


def _by_options(points: Sequence[Point]) -> list[list[Point]]:
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(json.dumps(point.options, sort_keys=True), []).append(point)
    return list(groups.values())


# ---- what is varied


def engine_variants(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the options of each server: the product of the --vary values, combined with each of --serve-params. Raises
    ValueError."""
    varied = {canonical_name(name): values for name, values in a.vary} or ({} if a.serve_params else USUAL_VALUES)
    variants = []
    for given in a.serve_params or [{}]:
        for chosen in product(*varied.values()):
            options = {canonical_name(name): value for name, value in given.items()}
            options.update(zip(varied, chosen, strict=True))
            variants.append({name: _checked(name, value) for name, value in options.items()})
    return variants


def _checked(name: str, value: Any) -> Any:
    if name not in _ENGINE or name == "model":
        raise ConfigError(unknown(name, _ENGINE))
    return None if value is None else read_option(name, value)


def loads(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the loads: each rate with each concurrency, or those of --bench-params. Raises ValueError."""
    if a.bench_params:
        for load in a.bench_params:
            if wrong := [name for name in load if name not in (*_LOAD, *_WORKLOAD)]:
                raise ValueError(f"--bench-params: {wrong[0]!r} is none of {', '.join((*_LOAD, *_WORKLOAD))}")
        return [{name: load.get(name) for name in _LOAD} | load for load in a.bench_params]
    rates = [None if rate == float("inf") else rate for rate in a.request_rate or [None]]
    if wrong := [rate for rate in rates if rate is not None and not rate > 0]:
        raise ValueError(f"--request-rate must be positive, got {wrong[0]:g}")
    return [dict(zip(_LOAD, pair, strict=True)) for pair in product(rates, a.max_concurrency or [None])]


def describe(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_plain(value)}" for name, value in options.items()) or "defaults"


def describe_load(load: Mapping[str, Any]) -> str:
    """Describe a load, for example "4 requests/s" or "all at once, at most 8 at a time"."""
    rate = load.get("request_rate")
    most = load.get("max_concurrency")
    text = "all at once" if rate is None else f"{rate:g} requests/s"
    text += "" if most is None else f", at most {most}"
    return text + "".join(f", {name}={_plain(value)}" for name, value in load.items() if name not in _LOAD)


def _plain(value: Any) -> str:
    return "none" if value is None else str(value)
