"""Expert parallelism as data: which rank has which experts of a layer, and how they are balanced by load."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.experts import All2All
from quire.parallel.mesh import Communicator
from quire.parallel.step_halves import WholeStep

MOST_FIXED_TOKENS = 256  # of a rank's step; memory for the received rows grows with it and with the number of ranks


class StepCapacity:
    """The number of tokens for which every rank has room in the exchanges of a step.

    It covers the largest step of all ranks, so nothing is ever dropped. The ranks agree on it once before each step, on
    the host. Then no layer needs the host, and CUDA graphs can contain the exchanges. Larger steps have no fixed
    capacity: their ranks send numbers of rows first, which the host reads.
    """

    def __init__(self, group: Communicator, most: int = MOST_FIXED_TOKENS) -> None:
        """group: the ranks that exchange tokens. most: the largest fixed capacity."""
        self.group = group
        self.most = most
        self.tokens = 0  # 0: no fixed capacity in this step

    def agree(self, tokens: int, tokens_per_request: int) -> tuple[int, int]:
        """Set the capacity of the next step. All ranks call this together. Returns the largest number of tokens of a
        rank's step, and the number of tokens per request if it is the same on all ranks, otherwise 0."""
        largest, highest, lowest = self.group.maxima((tokens, tokens_per_request, -tokens_per_request))
        self.tokens = largest if largest <= self.most else 0
        return largest, highest if highest == -lowest else 0


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks among which the experts of a layer are distributed.

    replicated: whether all ranks have the same tokens in a step; otherwise they exchange them. redundant: how many
    experts have a second copy. measures: whether the layers count the tokens of each expert. turns: the turns of two
    half steps that exchange tokens alternately. backend: how tokens are exchanged. buffer: the memory that its kernels
    need. capacity: of the current step, if the backend uses a fixed one.
    """

    group: Communicator
    replicated: bool
    redundant: int = 0
    measures: bool = False
    turns: WholeStep = WholeStep()
    backend: All2All = "all_to_all"
    buffer: Any = None
    capacity: StepCapacity | None = None

    def first_slots(self, experts: int) -> list[int]:
        """Return the initial expert of each slot. Slots are numbered across all ranks, and each rank has equally many.
        The experts come in order, followed by second copies in the remaining slots."""
        size = -(-(experts + self.redundant) // self.group.size)
        return [slot % experts for slot in range(size * self.group.size)]


def loads_of_ranks(loads: Sequence[float], slots: Sequence[int], ranks: int) -> list[float]:
    """Return the load of each rank if the copies of an expert share its load equally. The arguments are those of
    `balanced_slots`."""
    size = len(slots) // ranks
    copies = Counter(slots)
    shares = [loads[expert] / copies[expert] for expert in slots]
    return [sum(shares[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def balanced_slots(loads: Sequence[float], slots: Sequence[int], ranks: int, gain: float = 0.03) -> list[int]:
    """Return the expert for each slot such that all ranks have about equal loads. Returns `slots` unchanged if the
    largest load of a rank would not fall by at least the fraction `gain`.

    loads: of each expert. slots: the current expert in each slot. Each expert gets one slot; each remaining slot goes
    to the expert whose copies have the highest load. Then the copies are assigned to ranks, the heaviest first, each to
    the rank with the lowest load that has a free slot. A copy stays in its slot if its rank has the same expert
    already. DeepSeek's load balancer (github.com/deepseek-ai/EPLB) has the same two steps.
    """
    size = len(slots) // ranks
    copies = [1] * len(loads)
    for _ in range(len(slots) - len(loads)):
        heaviest = max(range(len(loads)), key=lambda e: loads[e] / copies[e])
        copies[heaviest] += 1
    shares = sorted(((loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e])), reverse=True)
    sums = [0.0] * ranks
    dealt = [list[int]() for _ in range(ranks)]
    for load, expert in shares:
        free = [rank for rank in range(ranks) if len(dealt[rank]) < size]
        # two copies of an expert on one rank are no better than one
        rank = min(free, key=lambda r: (expert in dealt[r], sums[r], expert not in slots[r * size : (r + 1) * size]))
        dealt[rank].append(expert)
        sums[rank] += load
    result = []
    for rank, experts in enumerate(dealt):
        before = slots[rank * size : (rank + 1) * size]
        coming = list(experts)
        kept = list[int | None]()
        for expert in before:
            stays = expert in coming
            kept.append(expert if stays else None)
            if stays:
                coming.remove(expert)
        result += [coming.pop(0) if expert is None else expert for expert in kept]
    largest = (max(loads_of_ranks(loads, of_slots, ranks)) for of_slots in (result, slots))
    return result if next(largest) < (1 - gain) * next(largest) else list(slots)
