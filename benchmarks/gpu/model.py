"""The minimum time of a launch, computed from its work and the rates of a card (rates.py).

A program (thread block) uses the stations of its processor: tensor cores, exponentials, arithmetic, comparisons, shared
memory and instruction issue. If the work at one station depends on the previous one, as with a softmax between two
products, only independent instruction streams overlap. These are warps for mma.sync, and programs or warpgroups for
wgmma and tcgen05, since all warps of a group wait for the results of these instructions. The streams are the customers
of a closed queueing network, whose throughput is computed by mean value analysis (Reiser and Lavenberg, 1980). Work
without such dependencies, as in a matrix product, overlaps perfectly. Memory is shared by all processors, and limited
by the bytes in flight (Little's law).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.gpu.rates import (
    CLOCKS_PER_INSTRUCTION,
    ISSUED_PER_CLOCK,
    LAUNCH,
    LOAD_STORE_LANES,
    MEMORY_LATENCY,
    SHARED_BYTES_PER_CLOCK,
    STORE,
    Rates,
)

WARP = 32


@dataclass(frozen=True)
class Work:
    """The work of a launch. All counts are averages per program. programs: the number of programs with work. resident:
    how many of them a processor can run at a time. longest: the longest program's work as a multiple of the average.
    moved: bytes between memory and the chip. cached: bytes loaded from or stored to the second-level cache or memory.
    in_flight: the maximum of bytes requested but not yet received. products: operations of tensor cores. is_eight:
    whether their inputs have 8 bits. synchronous: whether they are issued as mma.sync. Lanes: operations of single
    threads, by pipe: fma, alu, special, memory. instructions: warp instructions in all pipes. shared: bytes of shared
    memory read and written. streams: independent streams of instructions for each scheduler in one program; 0 if
    stations do not depend on each other. is_prefetched: loads of later iterations are in flight while this one
    computes. is_persistent: programs take several tiles each, and overlap the end of one with the start of the next.
    path: instructions that one warp executes in sequence while the program waits for them. memory_share: of a simple
    kernel's bandwidth. is_overlapped: the launch is hidden by the end of the kernel before it.
    """

    name: str
    programs: int
    resident: int = 1
    longest: float = 1.0
    moved: float = 0.0
    cached: float = 0.0
    in_flight: float = math.inf
    products: float = 0.0
    is_eight: bool = False
    synchronous: bool = True
    lanes: dict[str, float] = field(default_factory=dict)
    instructions: float = 0.0
    shared: float = 0.0
    streams: float = 0.0
    is_prefetched: bool = True
    is_persistent: bool = False
    path: float = 0.0
    memory_share: float = 1.0
    is_overlapped: bool = False


@dataclass(frozen=True)
class Estimate:
    """seconds: the time of a launch inside a graph. bound: the limiting part. share: of the roofline. parts: seconds
    that each part would take alone.
    """

    name: str
    seconds: float
    bound: str
    share: float
    parts: dict[str, float]


def queueing(demands: list[float], streams: float) -> float:
    """Return the time in which the stations complete all `demands`, if only `streams` streams run at once."""
    if streams <= 0:
        return max(demands, default=0.0)
    queues = [0.0] * len(demands)
    response = 0.0
    count = max(1, round(streams))
    for customers in range(1, count + 1):
        waits = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        response = sum(waits)
        queues = [customers * wait / response for wait in waits]
    return response / count


def stations(work: Work, rates: Rates) -> dict[str, float]:
    """Return the clocks that one program needs at each station of a processor."""
    card = rates.card
    share = rates.synchronous if work.synchronous else 1.0
    tensor = rates.products(work.is_eight) / card.processors / rates.clock * share
    lanes = {"fma": rates.fma, "alu": rates.alu, "special": rates.special, "memory": LOAD_STORE_LANES}
    clocks = {name: count / lanes[name] for name, count in work.lanes.items()}
    clocks["tensor"] = work.products / tensor
    clocks["shared"] = work.shared / SHARED_BYTES_PER_CLOCK
    return {name: count for name, count in clocks.items() if count}


def _computing(work: Work, rates: Rates, resident: int) -> tuple[float, dict[str, float]]:
    """Return the seconds that a processor takes for `resident` concurrent programs, and the share of each station."""
    clocks = {name: count * resident for name, count in stations(work, rates).items()}
    issue = work.instructions * resident / ISSUED_PER_CLOCK
    if not clocks and not issue:
        return 0.0, {}
    total = max(queueing(list(clocks.values()), work.streams * resident), issue)
    clocks["issue"] = issue
    tensor_share = clocks.get("tensor", 0.0) * (rates.synchronous if work.synchronous else 1.0) / total
    sustained = rates.sustained_eight if work.is_eight else rates.sustained
    clock = rates.clock * (1 - (1 - sustained) * tensor_share)
    return total / clock, {name: count / clock for name, count in clocks.items()}


def roofline(work: Work, rates: Rates) -> float:
    """Return the larger of bytes / bandwidth and operations / tensor rate in seconds, both from the data sheet."""
    return work.programs * max(work.moved / rates.bandwidth, work.products / rates.products(work.is_eight))


def estimate(work: Work, rates: Rates) -> Estimate:
    """Return the time of the launch on a card."""
    processors = rates.card.processors
    resident = max(1, work.resident)
    slots = processors * resident
    waves, rest = divmod(work.programs, slots)
    if work.is_persistent:
        waves = work.programs / slots
        rest = 0
    launch = 0.0 if work.is_overlapped else LAUNCH
    parts: dict[str, float] = {"launch": launch, "memory": 0.0, "latency": 0.0, "compute": 0.0, "tail": 0.0}

    def wave(programs: int, at_once: int) -> float:
        """Return the seconds of programs that start together."""
        compute, _ = _computing(work, rates, at_once)
        moved = max(programs * work.moved / bandwidth, programs * work.cached / rates.l2_bandwidth)
        waiting = (max(work.cached, work.moved) / work.in_flight) * MEMORY_LATENCY
        if not work.is_prefetched:
            waiting += _computing(work, rates, 1)[0]
        start = (MEMORY_LATENCY + STORE) / at_once  # neighbours on the processor hide the rest
        return max(compute, moved, waiting, path) + start

    bandwidth = rates.memory_bandwidth * work.memory_share
    path = work.path * CLOCKS_PER_INSTRUCTION / rates.clock
    body = 0.0
    if work.longest > 1 and waves >= 1:  # programs of different lengths fill each other's gaps, up to the last ones
        average = wave(slots, resident)
        count = work.programs / slots
        last = work.longest * _alone(work, rates)  # it starts among the first
        body = max(count * average + last / 2, last)
        parts["tail"] = body - count * average
    else:
        full = wave(slots, resident) if waves else 0.0
        at_once = math.ceil(rest / processors)
        last = wave(rest, at_once) if rest else 0.0
        body = waves * full + last
        if rest and waves:
            parts["tail"] = last - rest / slots * full
        if rest and not waves and work.longest > 1:
            body *= work.longest
    compute, by_station = _computing(work, rates, resident)
    share_of_wave = work.programs / slots
    for name, seconds in by_station.items():
        parts[name] = seconds * share_of_wave
    parts["compute"] = compute * share_of_wave
    parts["memory"] = work.programs * work.moved / bandwidth
    parts["l2"] = work.programs * work.cached / rates.l2_bandwidth
    if math.isfinite(work.in_flight):
        parts["latency"] = max(work.cached, work.moved) / work.in_flight * MEMORY_LATENCY * max(1.0, share_of_wave)
    seconds = body + launch
    return Estimate(work.name, seconds, _bound(parts, seconds), roofline(work, rates) / seconds, parts)


def _alone(work: Work, rates: Rates) -> float:
    """Return the seconds of an average program that is alone on its processor: it computes, or waits for memory."""
    return max(_computing(work, rates, 1)[0], max(work.cached, work.moved) / work.in_flight * MEMORY_LATENCY)


def _bound(parts: dict[str, float], seconds: float) -> str:
    """Return the part with the most time. Fixed costs are the bound if they exceed half of the total."""
    named = {
        name: parts.get(name, 0.0)
        for name in ("memory", "l2", "latency", "tensor", "fma", "alu", "special", "shared", "issue", "tail")
    }
    name = max(named, key=lambda key: named[key])
    if named[name] < seconds / 2 and named[name] < parts["compute"]:
        return "dependences" if parts["compute"] > seconds / 2 else "launch"
    return name if named[name] > seconds / 2 or named[name] > LAUNCH * 2 else "launch"


def resident_programs(rates: Rates, warps: int, registers: int, shared: int) -> int:
    """Return how many programs fit on a processor at a time. registers: per thread. shared: bytes per program."""
    card = rates.card
    allocated = math.ceil(registers / 8) * 8 * WARP * warps
    by_memory = card.processor_memory // (shared + card.reserved_memory) if shared + card.reserved_memory else math.inf
    return int(max(1, min(card.registers // max(1, allocated), by_memory, card.warps // warps, card.programs)))
