"""What the layers of a forward share: the state of the step, and the rows that are still wanted."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.layers.step_inputs import StepInputs


@dataclass
class ForwardState:
    """What every layer of a step shares. rotary: cos and sin [tokens, rotary_dim / 2], float32, of each of the model's
    variants; plans: one a KV group."""

    inputs: StepInputs
    rotary: list[tuple[Tensor, Tensor]]
    plans: list[Any]


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """x[rows]; x itself for None."""
    return x if rows is None else x.index_select(0, rows)
