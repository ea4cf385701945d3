"""Layouts: how a model and its requests are distributed across the ranks of a plan."""

import re
from dataclasses import dataclass
from functools import cached_property

from quire.layers.specs import MoESpec
from quire.models.parameters import Share
from quire.models.spec import DecoderSpec
from quire.parallel.sizes import balanced_parts
from quire.planner.sizes import Footprint


@dataclass(frozen=True)
class Layout:
    """tp, pp, dp: ranks that share each layer, stages, and replicas. ep: whole experts are distributed across the tp
    ranks of all replicas of a stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def shares_experts(self) -> bool:
        """Whether replicas share experts, and therefore run their steps together."""
        return self.ep and self.dp > 1

    def __str__(self) -> str:
        axes = [f"{name} {size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1]
        return " × ".join(axes or ["1 rank"]) + (" + ep" if self.ep else "")

    @property
    def flags(self) -> str:
        """Return the layout as options of `quire serve`."""
        sizes = {"-tp": self.tp, "-pp": self.pp, "-dp": self.dp}
        return " ".join(
            [*(f"{flag} {size}" for flag, size in sizes.items() if size > 1), *(["-ep"] if self.ep else [])]
        )


def layouts(ranks: int, spec: DecoderSpec) -> list[Layout]:
    """Return all layouts of this many ranks that the model allows, those with the fewest ranks per replica first."""
    has_experts = any(isinstance(mlp, MoESpec) for mlp in spec.mlps)
    heads = min(part.num_heads for _, part in spec.cached)
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    found = [
        Layout(tp, pp, ranks // (tp * pp), ep)
        for tp in sizes
        for pp in sizes
        for ep in (False, True)[: 1 + has_experts]
        if ranks % (tp * pp) == 0 and tp <= heads and pp <= spec.num_layers and (ranks > pp or not ep)
    ]
    return sorted(found, key=lambda layout: (layout.tp * layout.pp, layout.pp, layout.ep))


def parse_layout(text: str) -> Layout:
    """ "tp=4,dp=2,ep" -> Layout(4, 1, 2, True). Raises ValueError."""
    fields: dict[str, int] = {}
    parts = [part.strip().lower() for part in text.split(",")]
    for part in parts:
        match = re.fullmatch(r"(tp|pp|dp)=([1-9]\d*)", part)
        if match and match[1] not in fields:
            fields[match[1]] = int(match[2])
        elif part != "ep":
            raise ValueError(f"layout={text!r} must be sizes of tp, pp and dp, and perhaps ep, such as tp=4,dp=2,ep")
    return Layout(**fields, ep="ep" in parts)


@dataclass(frozen=True)
class Stages:
    """The model parts of a layout's ranks: one per stage, since all ranks of a stage have equally large parts."""

    footprint: Footprint
    layout: Layout

    @cached_property
    def parts(self) -> list[Footprint]:
        """Split the model like quire/models/stages.py: the slowest stage reads as few bytes as possible, and half of
        the head's bytes are counted."""
        spec = self.footprint.spec
        layout = self.layout
        experts = layout.tp * layout.dp if layout.ep else 1
        if layout.pp == 1:
            return [self.footprint.of(Share(layout.tp, expert_ranks=experts))]
        together = spec.indivisible
        costs = []
        for layers in together:
            of_layers = self.footprint.of(Share(layout.tp, layers, False, False, experts)).parameters
            costs.append(int(self.footprint.linear * (of_layers.experts + of_layers.rest)))
        head = self.footprint.of(Share(layout.tp, range(0), False, True)).parameters
        costs[-1] += int(self.footprint.head * head.output) // 2
        parts = []
        start = 0
        for number, count in enumerate(balanced_parts(together, costs, layout.pp)):
            is_first = number == 0
            is_last = number == layout.pp - 1
            share = Share(layout.tp, range(start, start + count), is_first, is_last, experts)
            parts.append(self.footprint.of(share))
            start += count
        return parts
