"""Measures the speed of the kernels on this machine: matrix products by rows and threads, and thread dispatch.

    plan     int4 x 2 threads x 1, 16, 32 ... 2048 rows | the same for other weights | 1 thread x 1, 512 rows | calls
    round 1  a sample of some milliseconds for each     round 2  once more ...     until the time is used

Other programs only make a sample slower, so the fastest of several rounds is used. The difference between the two
fastest rounds, and the threads' share of processor time, show whether the machine was busy.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire.ops import Kernels, Target, memory
from quire.ops.cpu.build import library
from quire.ops.cpu.panels import Panels
from quire.ops.cpu.quantized_linear import QuantizedPanels
from quire.ops.reference.quantized import QuantizedMatrix
from quire.platform.machine_profile import MachineProfile, Rates

SECONDS = 2.0  # a measurement ends after this time
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
KINDS = {"dense": None, "int8": (8, 1024), "int4": (4, 32)}  # kinds of weights: bits, and inputs that share a scale
CALL = "call"
NEEDED_BYTES = 1 << 30  # of free memory, so that measuring does not starve other programs
_ROWS_OF_FEWER = (1, 512)  # for fewer threads than available: enough to choose their number
_ROUNDS = 5
_LEAST_ROUNDS = 2
_IN, _OUT = 1024, 32768  # of the weights, which are larger than the caches of most processors in bfloat16
_TILE = 512  # outputs whose random weights are repeated
_LEAST_OUTS = 256  # in a product with many rows; two panels per thread if that is more
_OPERATIONS = 4e8  # in a sample of several products, unless they take longer than _SHORTEST
_SHORTEST = 0.004  # seconds
_LONGEST = 0.15  # seconds per sample; larger ones are skipped
_CALLS = 200
_CALL_SHAPE = (1024, 32)  # the smallest weight whose product is shared among threads

Point = tuple[str, int, int]  # kind of weights or CALL, threads, rows


@dataclass(frozen=True)
class Sample:
    """operations: the number of operations or calls. seconds: elapsed time, and processor time of all threads."""

    operations: float
    seconds: float
    processor_seconds: float


Probe = Callable[[Point], Sample]


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads that are worth measuring: powers of two, and steps below the maximum."""
    counts = {1 << n for n in range(most.bit_length())} | {most // 2, 3 * most // 4, most}
    return sorted(count for count in counts if 1 <= count <= most)


def plan(threads: int, kinds: tuple[str, ...]) -> list[Point]:
    """Return the points to measure, small products first."""
    *fewer, most = thread_counts(threads)
    points = [(CALL, count, 1) for count in (*fewer, most)]
    points += [(kind, most, rows) for rows in ROWS for kind in kinds]
    return points + [(kind, count, rows) for count in reversed(fewer) for rows in _ROWS_OF_FEWER for kind in kinds]


class Measurement:
    """Takes one sample at a time, so that the caller can do other work between samples."""

    def __init__(
        self,
        threads: int,
        kinds: tuple[str, ...],
        probe: Probe,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        compiled: bool = True,
    ) -> None:
        """probe: takes a sample. seconds: the time for all samples together. compiled: whether the kernels are
        compiled."""
        self._compiled = compiled
        self._threads = threads
        self._probe = probe
        self._clock = clock
        self._samples: dict[Point, list[Sample]] = {point: [] for point in plan(threads, kinds)}
        self._left = seconds
        self._points = self._rounds()

    def proceed(self) -> bool:
        """Take a sample. Returns False when there is nothing left to do."""
        began = self._clock()
        point = next(self._points, None) if self._left > 0 else None
        if point is None:
            return False
        self._samples[point].append(self._probe(point))
        self._left -= self._clock() - began
        return True

    def profile(self) -> MachineProfile:
        """Return the measured profile. It is empty, as for a busy machine, if there was no time for two rounds."""
        if any(len(samples) < _LEAST_ROUNDS for point, samples in self._samples.items() if self._fits(point)):
            return MachineProfile({}, {}, self._threads, 1.0, 0.0, time.time(), self._compiled)
        rates: Rates = {}
        calls: dict[int, float] = {}
        differences: list[float] = []
        shares: list[float] = []
        for (kind, threads, rows), samples in self._samples.items():
            if not samples:
                continue
            first, second, *_ = sorted(samples, key=_seconds_each)
            differences.append(_seconds_each(second) / _seconds_each(first) - 1)
            shares.append(first.processor_seconds / first.seconds / threads)
            if kind == CALL:
                calls[threads] = _seconds_each(first)
            else:
                rates.setdefault(kind, {}).setdefault(threads, {})[rows] = 1 / _seconds_each(first)
        return MachineProfile(
            rates, calls, self._threads, median(differences), min(median(shares), 1.0), time.time(), self._compiled
        )

    def _rounds(self) -> Iterator[Point]:
        for _ in range(_ROUNDS):
            yield from filter(self._fits, self._samples)

    def _fits(self, point: Point) -> bool:
        """Whether a sample is short enough, judged by the sample of the next smaller product."""
        kind, threads, rows = point
        if kind == CALL or rows == 1:
            return True
        smaller = [self._samples[other] for other in self._samples if other[0] == kind and other[2] < rows]
        known = [min(map(_seconds_each, samples)) for samples in smaller if samples]
        return not known or 2.0 * rows * _IN * outs_of(threads) * min(known) <= _LONGEST


def _seconds_each(sample: Sample) -> float:
    return max(sample.seconds, 1e-9) / sample.operations


def outs_of(threads: int) -> int:
    """Return the number of outputs of a product with several rows."""
    return min(_OUT, max(_LEAST_OUTS, 128 * threads))


class KernelProbe:
    """Runs the engine's kernels with random weights, created when they are first needed."""

    def __init__(self) -> None:
        self._kernels = Kernels(Target(torch.device("cpu"), torch.bfloat16))
        self.compiled = library() is not None
        self.kinds = tuple(KINDS) if self.compiled else ("dense",)  # torch would dequantize others in each product
        self._x = torch.randn(ROWS[-1], _IN, generator=_generator()).to(torch.bfloat16)
        self._weights = cache(self._made)
        self._next: dict[str, int] = {}
        small = torch.randn(_CALL_SHAPE, generator=_generator()).to(torch.bfloat16)
        self._small = self._packed("linear", small)

    def __call__(self, point: Point) -> Sample:
        kind, threads, rows = point
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            if kind == CALL:
                x = self._x[:1, : _CALL_SHAPE[1]].contiguous()
                return self._timed(_CALLS, lambda: self._kernels.linear(x, self._small, None), 1.0)
            return self._product(kind, threads, rows)
        finally:
            torch.set_num_threads(before)

    def _product(self, kind: str, threads: int, rows: int) -> Sample:
        weights = self._weights(kind)
        x = self._x[:rows]
        multiply = self._kernels.linear if kind == "dense" else self._kernels.quantized_linear
        if rows == 1:
            return self._timed(1, lambda: multiply(x, weights, None), 2.0 * _IN * _OUT)
        outs = outs_of(threads)
        operations = 2.0 * rows * _IN * outs

        def run() -> None:
            start = self._next.get(kind, 0)
            if start + outs > _OUT:
                start = 0
            self._next[kind] = start + outs  # not the weights of the previous product, which may be cached
            multiply(x, _outputs(weights, start, start + outs), None)

        return self._timed(max(1, math.ceil(_OPERATIONS / operations)), run, operations)

    def _timed(self, times: int, run: Callable[[], object], operations: float) -> Sample:
        began = time.perf_counter()
        processor_began = time.process_time()
        done = 0
        seconds = 0.0
        while done < times and seconds < _SHORTEST:
            run()
            done = done + 1
            seconds = time.perf_counter() - began
        return Sample(operations * done, seconds, time.process_time() - processor_began)

    def _made(self, kind: str) -> Any:
        tile = (torch.randn(_TILE, _IN, generator=_generator()) * 0.02).to(torch.bfloat16)
        if kind == "dense":
            return self._packed("linear", _repeated(tile))
        bits, group = KINDS[kind]  # type: ignore[misc]
        matrix: QuantizedMatrix = self._kernels.quantize(tile, bits, group)
        repeated: dict[str, Any] = {name: _repeated(tensor) for name, tensor in matrix.by_row.items()}
        return self._packed("quantized_linear", replace(matrix, **repeated))

    def _packed(self, op: str, weight: Any) -> Any:
        pack = getattr(getattr(self._kernels, op), "pack", None)
        return weight if pack is None else pack(weight)


def _generator() -> torch.Generator:
    """Return a separate generator, since the state of torch's default one belongs to the process."""
    return torch.Generator().manual_seed(0)


def _repeated(tile: Tensor) -> Tensor:
    """Repeat the rows of a tile [_TILE, n] to [_OUT, n], in memory that is returned to the system at the end."""
    count = _OUT // len(tile)
    tensor = memory.zeros(_OUT, tile.shape[1], dtype=tile.dtype, device=tile.device)
    tensor.view(count, *tile.shape).copy_(tile.expand(count, *tile.shape))
    return tensor


def _outputs(weights: Any, start: int, stop: int) -> Any:
    if isinstance(weights, Panels):
        return weights.part(start, stop)
    if isinstance(weights, QuantizedMatrix | QuantizedPanels):
        return weights.rows(start, stop)
    return weights[start:stop]
