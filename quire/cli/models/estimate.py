"""Whether a model fits into this machine's memory, and roughly how fast it generates."""

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

from quire.cli.models.machine import Machine
from quire.planner.devices import KINDS, Device
from quire.planner.layout import Layout
from quire.planner.roofline import RooflineTimes
from quire.planner.sizes import Footprint
from quire.planner.work import step_work


@dataclass(frozen=True)
class Estimate:
    """A way to run a model on this machine.

    quantization: the value of --quantization, None for the weights as they are. memory: bytes of the weights.
    context: how many tokens of the longest request fit in memory; 0 if the weights do not fit.
    tokens_per_second: of one request with a short context, None for a model that generates nothing.
    """

    quantization: str | None
    memory: int
    context: int
    tokens_per_second: float | None

    @property
    def option(self) -> str:
        return "as it is" if self.quantization is None else f"--quantization {self.quantization}"


def estimates(footprint: Footprint, machine: Machine) -> list[Estimate]:
    """Return one estimate for each value of --quantization."""
    return [_estimate(footprint, machine, quantization) for quantization in footprint.quantizations]


def tokens_per_second(read: float, bandwidth: float) -> float:
    """read: bytes of weights read for each token. bandwidth: of the memory, in bytes per second."""
    kind = KINDS["measured"]
    return 1 / (kind.step + read / (kind.weight_share * bandwidth))


def _estimate(footprint: Footprint, machine: Machine, quantization: str | None) -> Estimate:
    memory, _ = footprint.weights(quantization)
    room = int(machine.cache_share * (machine.free - memory))
    longest = footprint.spec.max_positions
    context = 0 if room < 0 else bisect_right(range(longest + 1), room, key=footprint.cache) - 1
    speed = _speed(footprint, machine, quantization) if footprint.generates else None
    return Estimate(quantization, round(memory), context, speed)


def _speed(footprint: Footprint, machine: Machine, quantization: str | None) -> float:
    """Return the estimated speed of one request with a short context, if only reading memory takes time."""
    device = Device(machine.device, machine.free, machine.bandwidth, {"bf16": inf}, inf, KINDS["measured"])
    times = RooflineTimes(footprint, Layout(), device, quantization)
    return 1 / sum(times.stages([step_work([1], [1], 1, times.windows)]))
