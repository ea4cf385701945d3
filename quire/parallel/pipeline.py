"""The stages of a pipeline: which layers each rank has, and how hidden states pass from one stage to the next."""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quire.parallel.mesh import Communicator
from quire.parallel.residual_stream import ResidualStream

_MOST_ON_THE_WAY = 8  # earlier tensors have long arrived; waiting for them frees their memory


@dataclass(frozen=True)
class Stage:
    """The part of a model on a rank. The first stage has the embedding; the last one has the final norm and the head.
    The last stage also has the embedding if its head or a drafter uses the same table."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True


class Pipe:
    """Passes the residual stream from stage to stage, on one rank.

    Each rank of a tensor-parallel group sends its part of the stream to the rank with the same number in the next
    stage, so each value is sent only once.
    """

    def __init__(self, stages: Communicator, stream: ResidualStream, hidden_size: int) -> None:
        """stages: the group of ranks with which this one exchanges the stream."""
        self.stages = stages
        self.stream = stream
        self.hidden_size = hidden_size
        self.is_first = stages.rank == 0
        self.is_last = stages.rank == stages.size - 1
        self._on_the_way: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive the previous stage's stream for a step of `tokens` tokens, [own tokens, hidden]."""
        shape = self.stream.part(self.stream.own(torch.empty(tokens, self.hidden_size, device="meta"))).shape
        part = torch.empty(shape, dtype=dtype, device=device)
        if part.numel():
            self.stages.receive(part, self.stages.rank - 1)
        return self.stream.join(part, self.hidden_size)

    def send(self, x: Tensor) -> None:
        """Send the stream [own tokens, hidden] to the next stage. Returns at once; x may change afterwards."""
        if len(self._on_the_way) == _MOST_ON_THE_WAY:
            self._on_the_way.popleft()[0].wait()
        part = self.stream.part(x).clone(memory_format=torch.contiguous_format)
        if part.numel():
            self._on_the_way.append((self.stages.send(part, self.stages.rank + 1), part))
