"""The expected time of attention for a long request among short ones, compared with requests that are equally long.

    python -m benchmarks.gpu.skew [--cards H200 H100]

Both batches have equally many tokens in the cache, and the same launches: only the plan on the device differs
(quire/ops/triton/attention_work.py). "undivided" is the skewed batch with one item for each tile.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.model import estimate
from benchmarks.gpu.rates import RATES, Rates

REQUESTS = 256
LONG = 65_536  # tokens
SHORT = 576
CHUNK = 64  # tokens of the prompt in a mixed step
HEADS = 32  # Llama-3-8B
KV_HEADS = 8
DIM = 128


@dataclass(frozen=True)
class Skew:
    """Seconds of a layer's attention, with merging."""

    case: str
    even: float
    skewed: float
    undivided: float
    programs: int  # of the skewed batch

    @property
    def ratio(self) -> float:
        return self.skewed / self.even


def steps() -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return the tokens of each request in a step, and the skewed and even lengths after it. A mixed step has a request
    with a short prompt."""
    skewed = (LONG, *[SHORT] * (REQUESTS - 1))
    average = sum(skewed) // REQUESTS
    even = (average,) * REQUESTS
    return {
        "decode": ((1,) * REQUESTS, skewed, even),
        "mixed": ((*[1] * (REQUESTS - 1), CHUNK), (*skewed[:-1], CHUNK), (*even[:-1], CHUNK)),
    }


def launches(device: Any, counts: tuple[int, ...]) -> list[Any]:
    """Return the launches of a step's attention on the stand-in. Lengths are on the device, so launches do not depend
    on them."""
    import torch

    from quire.attention.base import AttentionShape, StepLayout
    from quire.attention.triton.attention_backend import TritonAttention

    gpu = torch.device("cuda", 0)
    backend = TritonAttention(AttentionShape(HEADS, KV_HEADS, DIM, 16, torch.bfloat16, gpu))
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=gpu)
    slots = torch.zeros(sum(counts), dtype=torch.int64, device=gpu)
    table = torch.zeros(len(counts), LONG // 16, dtype=torch.int32, device=gpu)
    cache = backend.view(torch.zeros(64, backend.entry_bytes(), dtype=torch.uint8, device=gpu), 0)
    q = torch.zeros(sum(counts), HEADS, DIM, dtype=torch.bfloat16, device=gpu)
    uniform = counts[0] if len(set(counts)) == 1 else 0
    with device.traced() as traced:
        plan = backend.plan(StepLayout(starts, starts[1:], slots, table, tokens_per_request=uniform))
        backend.attend(q, cache, plan, scale=DIM**-0.5)
    return [launch for launch in traced if launch.kernel is not None]


def seconds(found: list[Any], rates: Rates, counts: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[float, int]:
    """Return the seconds of attention and merging, and the programs with work. The plan is made once for all layers."""
    from benchmarks.gpu.launches import Step, plans_of, works

    step = Step(counts, lengths, plans_of(found))
    work = [work for launch in found if launch.name != "plan_kernel" for work in works(launch, rates, step)]
    return sum(estimate(each, rates).seconds for each in work), work[0].programs


def compare(card: str, device: Any) -> list[Skew]:
    """Return the comparison for both kinds of steps. device: a stand-in of the card's capability."""
    rates = RATES[card]
    result = []
    for case, (counts, skewed, even) in steps().items():
        found = launches(device, counts)
        divided, programs = seconds(found, rates, counts, skewed)
        equal, _ = seconds(found, rates, counts, even)
        whole = [replace(x, arguments=x.arguments | {"fewest": 1 << 30}) for x in found if x.name == "plan_kernel"]
        attend = next(launch for launch in found if launch.name == "attend_kernel")
        undivided, _ = seconds([*whole, attend], rates, counts, skewed)
        result.append(Skew(case, equal, divided, undivided, programs))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", default=["H200", "H100"], help="of one compute capability")
    cards = parser.parse_args().cards
    if len({RATES[card].card.capability for card in cards}) > 1:
        parser.error("the cards have different compute capabilities")
    from benchmarks.gpu.tracing import stand_in

    print("| card | step | even, µs | skewed, µs | skewed / even | undivided, µs | programs |")
    print("|---|---|---|---|---|---|---|")
    with stand_in(RATES[cards[0]].card) as device:
        for card in cards:
            for found in compare(card, device):
                times = (f"{1e6 * value:.0f}" for value in (found.even, found.skewed))
                print(
                    f"| {card} | {found.case} | {' | '.join(times)} | {found.ratio:.2f} "
                    f"| {1e6 * found.undivided:.0f} | {found.programs} |"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
