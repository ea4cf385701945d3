"""Measures the kernels of a step on a device, compares them with their expected times, and tries other tiles.

Used by gpu_suite.py. The expected times are those of expect.py (benchmarks/results/gpu-expected.json).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

EXPECTED = Path(__file__).resolve().parent.parent / "results" / "gpu-expected.json"
PRODUCTS = "matrix products of torch"
OTHERS = "other operations of torch"
_PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|splitk|cublas|scaled_mm|^(addmm|mm|bmm|linear|matmul)$", re.IGNORECASE)
_TRITON = re.compile(r"^(_\w+|\w+_kernel)$")
_FREE_SIZES = "KEYS", "INS"  # constants of kernels that do not affect the grid

Kernel = dict[str, Any]  # name; seconds and number of all its launches in a step


class Difference(NamedTuple):
    """A kernel of a figure that takes longer than expected. Times include all its launches in a step."""

    figure: str
    kernel: str
    seconds: float
    expected: float

    @property
    def lost(self) -> float:
        return self.seconds - self.expected


def kind_of(name: str) -> str:
    """Return the name under which a kernel's time is compared: its own if Triton compiled it, else its purpose in
    torch.

    "attend_kernel" -> "attend_kernel"; "_product 1 x 4096 x 6144" -> "_product"; "nvjet_tst_64x8" and "mm" -> PRODUCTS;
    "Memcpy HtoD" -> OTHERS
    """
    if _PRODUCT.search(name.removeprefix("aten.").removesuffix(".default")):
        return PRODUCTS
    word = name.partition(" ")[0]
    return word if _TRITON.match(word) else OTHERS


def summed(kernels: list[Kernel]) -> list[Kernel]:
    """Return the kernels summed by their `kind_of` names, those with the most time first."""
    sums: dict[str, Kernel] = {}
    for kernel in kernels:
        name = kind_of(kernel["name"])
        total = sums.setdefault(name, {"name": name, "seconds": 0.0, "launches": 0.0})
        total["seconds"] += kernel["seconds"]
        total["launches"] += kernel["launches"]
    return sorted(sums.values(), key=lambda kernel: -kernel["seconds"])


@contextlib.contextmanager
def profiled(steps: int, kernels: list[Kernel]) -> Iterator[Any]:
    """Append the kernels that run within this block to `kernels`, averaged over its `steps` equal steps."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 1 + torch.cuda.is_available()]) as profiler:
        yield profiler
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels += summed(
        [
            {
                "name": event.name,
                "seconds": (event.time_range.end - event.time_range.start) / 1e6 / steps,
                "launches": 1 / steps,
            }
            for event in events
        ]
    )


def decoding_steps(llm: Any, requests: int, context: int, steps: int, trace: Path | None = None) -> list[Kernel]:
    """Return the kernels of a step that decodes one token for each of `requests` requests. context: their average
    number of tokens. trace: a file for a Chrome trace of the steps.
    """
    from quire import SamplingParams

    # A stream enters the engine when it is first read, at most two steps after the previous one. The first stream is
    # therefore up to 2 * requests tokens ahead of the last.
    length = max(1, context - requests - steps // 2 - 4)
    temperature = 0.0 if requests == 1 else 0.6  # as in the expected times
    params = SamplingParams(temperature=temperature, max_tokens=2 * requests + steps + 16, ignore_eos=True)
    streams = [llm.stream([9 + i % 1000] * length, params) for i in range(requests)]
    for _ in range(4):
        for stream in streams:
            next(stream)
    kernels: list[Kernel] = []
    with profiled(steps, kernels) as profiler:
        for _ in range(steps):
            for stream in streams:
                next(stream)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    for stream in streams:
        stream.close()
    return kernels


def expected(device_name: str, path: Path = EXPECTED) -> dict[str, Any]:
    """Return the expected figures for a card, by torch's name of it, such as "NVIDIA H200". Empty if unknown."""
    cards = json.loads(path.read_text()) if path.exists() else {}
    words = re.split(r"[ -]", device_name)
    return next((figures for card, figures in cards.items() if {*card.split()} <= {*words}), {})


def differences(measured: dict[str, list[Kernel]], expected: dict[str, Any]) -> list[Difference]:
    """Return the kernels of the measured figures that have an expected time, those that lose the most time first."""
    found = []
    for figure, kernels in measured.items():
        wanted = {k["name"]: k["seconds"] for k in summed(expected.get(figure, {}).get("kernels", []))}
        found += [
            Difference(figure, k["name"], k["seconds"], wanted[k["name"]]) for k in kernels if k["name"] in wanted
        ]
    return sorted(found, key=lambda difference: -difference.lost)


# ---- other tiles


class Launch(NamedTuple):
    """A launch of a Triton kernel that can be repeated with other options or constants."""

    kernel: Any
    arguments: dict[str, Any]
    grid: Any
    options: dict[str, Any]

    def __call__(self, **changes: Any) -> None:
        names = set(self.kernel.arg_names)
        arguments = {**self.arguments, **{k: v for k, v in changes.items() if k in names}}
        options = {**self.options, **{k: v for k, v in changes.items() if k not in names}}
        self.kernel.run(*arguments.values(), grid=self.grid, warmup=False, **options)


@contextlib.contextmanager
def recorded(launches: dict[str, Launch]) -> Iterator[None]:
    """Record the last launch of each Triton kernel, by its name."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names = dict(zip(kernel.arg_names, args, strict=False))
        named = {key: value for key, value in options.items() if key in kernel.arg_names}
        others = {key: value for key, value in options.items() if key not in kernel.arg_names}
        if len(names | named) == len(kernel.arg_names):
            in_order = {name: (names | named)[name] for name in kernel.arg_names}
            launches[kernel.__name__] = Launch(kernel, in_order, grid, others)
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(JITFunction, "run", record):
        yield


def alternatives(launch: Launch) -> list[dict[str, int]]:
    """Return other tiles for a launch, each with one change: to the warps, the stages or a size that does not affect
    the grid.
    """
    warps = launch.options.get("num_warps", 4)
    stages = launch.options.get("num_stages", 3)
    changes = [{"num_warps": n} for n in (warps // 2, 2 * warps) if 1 <= n <= 16]
    changes += [{"num_stages": n} for n in (stages - 1, stages + 1, stages + 2) if 1 <= n <= 6]
    for name in _FREE_SIZES:
        if name in launch.arguments:
            size = launch.arguments[name]
            changes += [{name: n} for n in (size // 2, 2 * size) if n >= 16]
    return changes


def try_tiles(launch: Launch, clock: Callable[[Callable[[], object]], float]) -> dict[str, Any]:
    """Return the time of a launch with its own tile and with others, and the best tile. Tiles that do not fit the card
    are skipped. The best changes are also tried together."""
    tried: dict[str, float] = {}

    def attempt(changes: dict[str, int]) -> float:
        with contextlib.suppress(Exception):  # too much shared memory, or a size that the kernel does not support
            tried[_text(changes)] = clock(lambda: launch(**changes))
        return tried.get(_text(changes), float("inf"))

    own = attempt({})
    gains: dict[str, tuple[float, dict[str, int]]] = {}
    for changes in alternatives(launch):
        seconds = attempt(changes)
        name = next(iter(changes))
        if seconds < min(own, gains.get(name, (own, {}))[0]):
            gains[name] = seconds, changes
    if len(gains) > 1:
        attempt({name: n for _, changes in gains.values() for name, n in changes.items()})
    best = min(tried, key=lambda name: tried[name], default=_text({}))
    return {
        "own_us": 1e6 * own,
        "best": best,
        "best_us": 1e6 * tried.get(best, own),
        "tried_us": {name: 1e6 * seconds for name, seconds in tried.items()},
    }


@contextlib.contextmanager
def attention_tile(**changes: int) -> Iterator[None]:
    """Attention backends created within this block use tiles with these changes. See attention/tiles.py."""
    from quire.attention.triton import attention_backend as attention

    choose = attention.choose_tiles

    def changed(*args: Any) -> Any:
        tiles = choose(*args)
        return replace(tiles, few=replace(tiles.few, **changes), many=replace(tiles.many, **changes))

    with mock.patch.object(attention, "choose_tiles", changed):
        yield


def try_rows(
    result: dict[str, Any], rows: int, run: Callable[[], object], clock: Callable[[Callable[[], object]], float]
) -> None:
    """Add the times of the attention kernel with other tile rows, which change its grid, to those of `try_tiles`. rows:
    the rows of its default tile. run: creates a backend and computes attention.
    """
    for other in (rows // 2, 2 * rows):
        launches: dict[str, Launch] = {}
        with contextlib.suppress(Exception), attention_tile(rows=other), recorded(launches):
            run()
            name = _text({"rows": other})
            seconds = result["tried_us"][name] = 1e6 * clock(launches["attend_kernel"])
            if seconds < result["best_us"]:
                result |= {"best": name, "best_us": seconds}


def _text(changes: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "its own tile"
