"""Whether a model fits into this machine, and roughly how fast it generates here."""

from bisect import bisect_right
from dataclasses import dataclass

from quire_cli.models.machine import Machine
from quire_plan.sizes import Footprint

# Decoding reads all weights for each token, at this part of the speed at which the memory can be copied: 0.8 to 0.9 on
# the machines of docs/performance.md.
_EFFICIENCY = 0.85
_STEP_SECONDS = 150e-6  # what a step takes besides, measured with the bundled model; it matters only for tiny models


@dataclass(frozen=True)
class Estimate:
    """A way to run a model on this machine.

    quantization: the value of --quantization, None for the weights as they are. memory: bytes of the weights.
    context: how many tokens the longest request may have, as far as memory goes; 0 if the weights do not fit.
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
    """One estimate for each value of --quantization."""
    return [_estimate(footprint, machine, quantization) for quantization in footprint.quantizations]


def tokens_per_second(read: float, bandwidth: float) -> float:
    """read: bytes of weights for each token. bandwidth: of the memory, in bytes a second."""
    return 1 / (_STEP_SECONDS + read / (_EFFICIENCY * bandwidth))


def _estimate(footprint: Footprint, machine: Machine, quantization: str | None) -> Estimate:
    memory, read = footprint.weights(quantization)
    room = int(machine.cache_share * (machine.free - memory))
    longest = footprint.spec.max_positions
    context = 0 if room < 0 else bisect_right(range(longest + 1), room, key=footprint.cache) - 1
    speed = tokens_per_second(read, machine.bandwidth) if footprint.generates else None
    return Estimate(quantization, round(memory), context, speed)
