"""The experts of nomic-embed-text-v2-moe, whose tensors have the rows of all experts one after the other."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from quire.checkpoints.computed import ComputedCheckpoint, Read
from quire.checkpoints.weights import Checkpoint

ROWS = (".experts.mlp.w1", ".experts.mlp.w2")


def with_experts(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Present the rows of a tensor ...experts.mlp.w1, [experts * inner, hidden], as ...experts.mlp.w1.0.weight and so
    on, and those of w2 transposed, [hidden, inner]."""
    count = int(config["num_experts"])

    def rows(read: Read, name: str, expert: int) -> Tensor:
        size = checkpoint.shape(name)[0] // count
        part = read(name, slice(expert * size, (expert + 1) * size))
        return part.T if name.endswith("w2") else part

    names = [name for name in checkpoint.names if name.endswith(ROWS)]
    computed = {f"{name}.{e}.weight": partial(rows, name=name, expert=e) for name in names for e in range(count)}
    return ComputedCheckpoint(checkpoint, computed, frozenset(names))
