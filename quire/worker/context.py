"""Context parallelism in the worker: how contexts are divided, and the forward for a rank's share of a step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.attention.context import ContextAttention
from quire.attention.headwise import HeadwiseAttention
from quire.attention.stripes import StripedAttention
from quire.config.engine import ConfigError, ParallelConfig
from quire.layers.attention_spec import CacheShape
from quire.layers.step_inputs import StepInputs
from quire.models.model import Model, Shape
from quire.ops.memory import upload
from quire.parallel.mesh import Communicator, Mesh
from quire.worker.forward import Forward, ForwardParts


def check_context(shapes: Sequence[Shape], options: ParallelConfig) -> None:
    """Raises ConfigError if decode_context_parallel_size does not divide the ranks with the same cache."""
    dcp = options.decode_context_parallel_size
    tp = options.tensor_parallel_size
    for shape in shapes if dcp > 1 else ():
        assert isinstance(shape, CacheShape)
        if shape.holders % dcp:
            raise ConfigError(
                f"decode_context_parallel_size={dcp} must divide the number of ranks that have the same "
                f"KV heads and equally many query heads, which is {shape.holders} with "
                f"tensor_parallel_size={tp}; change one of the two"
            )


def choose_context(mesh: Mesh, shapes: Sequence[Shape]) -> type[ContextAttention] | None:
    """Choose how the contexts of a model with caches of these shapes are divided; None if they are not.

    If divided by heads, n ranks exchange about n times fewer bytes, but the number of KV heads must be divisible. All
    ranks of a replica make the same choice, and call this together.
    """
    if mesh.cp.size == 1:
        return StripedAttention if mesh.dcp.size > 1 else None
    attention = [shape for shape in shapes if isinstance(shape, CacheShape)]  # see check_context
    divisible = all(shape.value_dim is None and shape.num_kv_heads % mesh.cp.size == 0 for shape in attention)
    by_heads = mesh.replica.minimum(int(divisible and mesh.dcp.size == 1)) == 1
    return HeadwiseAttention if by_heads else StripedAttention


class ContextForward(Forward):
    """The forward of a rank that computes a share of each step's tokens. At the end, the ranks gather the hidden states
    that are needed, so that all of them can sample."""

    def __init__(
        self, model: Model, backends: Sequence[ContextAttention], group: Communicator, parts: ForwardParts
    ) -> None:
        """group: the ranks that compute the other tokens."""
        super().__init__(model, backends, parts)
        self.group = group
        self.owners = backends[0].owners
        # NCCL requires all ranks of a group to take part in its first operation.
        group.all_reduce(torch.zeros(1, device=model.kernels.target.device))

    def run(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        assert inputs.host_positions is not None
        owners = self.owners(inputs.host_positions)
        own = np.flatnonzero(owners == self.group.rank)
        places = np.full(len(owners), -1)  # of each token in this rank's share
        places[own] = np.arange(len(own))
        if not len(own):
            own = np.zeros(1, np.int64)  # layers need at least one token; its result is not used
        uploaded = upload(np.concatenate([own, places]), inputs.positions.device)
        tokens = uploaded[: len(own)]
        on_device = uploaded[len(own) :]
        share = inputs.share(tokens, np.bincount(owners, minlength=self.group.size).tolist())
        if not self.model.stage.has_head:
            return super().run(share)
        wanted = on_device if rows is None else on_device[rows]
        index = wanted.clamp(min=0)
        is_absent = (wanted < 0)[:, None]
        takes_less = len(index) < len(own)
        hidden = super().run(share, index) if takes_less else super().run(share).index_select(0, index)
        return self.group.all_reduce(hidden.masked_fill(is_absent, 0.0))
