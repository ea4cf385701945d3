"""Exchanges tokens between GPUs through torch's symmetric memory (NVSHMEM), with counts on the device. Selected with
--all2all-backend symmetric_memory.

A rank writes its rows, sorted by slot, into memory that all ranks can read. The op all_to_all_vdev_2d fetches the rows
of each rank's own slots, and all_to_all_vdev_2d_offset takes the results back. Both read the counts from the device.
"""

from typing import Any

import torch
from torch import Tensor

from quire.config.declaration import ConfigError
from quire.layers.build import Builder
from quire.layers.dispatch import Routed, Sent
from quire.layers.fixed_dispatch import FixedDispatch
from quire.messages.errors import error_text
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Communicator

_MOST_RANKS = 32  # the ops scan the counts with one warp
_MOST_SLOTS = 32  # per rank


class SymmetricBuffer:
    """The memory through which all layers exchange tokens. A rank overwrites what others have read: each op begins with
    a barrier of all ranks, and dispatch and return use separate memory.

    Raises ConfigError if torch has no NVSHMEM or a limit of its ops is exceeded. All ranks of the group must call it.
    """

    def __init__(
        self,
        group: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        hidden: int,
        slots: int,
        top_k: int,
        room: int,
    ) -> None:
        """slots: of all ranks. top_k: the largest of the layers. room: the largest number of tokens of a rank."""
        import torch.distributed._symmetric_memory as memory

        count = slots // group.size
        if group.size > _MOST_RANKS or count > _MOST_SLOTS:
            raise ConfigError(
                f"all2all_backend='symmetric_memory' is for at most {_MOST_RANKS} ranks with {_MOST_SLOTS} experts "
                f"each, but {group.size} ranks have {count}; use another one"
            )
        if not memory.is_nvshmem_available():
            raise ConfigError("all2all_backend='symmetric_memory' needs NVSHMEM, which torch does not find")
        assert group.group is not None
        self.name = group.group.group_name
        sent = room * top_k
        received = group.size * room * min(top_k, count)

        def shared(*shape: int, of: torch.dtype = dtype) -> Tensor:
            tensor: Tensor = memory.empty(*shape, dtype=of, device=device)
            memory.rendezvous(tensor, self.name)
            return tensor

        try:
            memory.set_backend("NVSHMEM")
            self.sent = shared(sent, hidden)
            self.received = shared(received, hidden)
            self.results = shared(received, hidden)
            self.returned = shared(sent, hidden)
            self.counts = shared(slots, of=torch.int64)
            self.places = shared(2, slots, of=torch.int64)
            self.returned_places = shared(2, slots, of=torch.int64)
        except Exception as error:  # it depends on drivers, cards and torch
            raise ConfigError(f"all2all_backend='symmetric_memory' cannot be used: {error_text(error)}") from error

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange rows that are sorted by slot. counts: [slots], rows of each slot. Returns the received rows, sorted
        by own slot and then by rank, followed by garbage; and the number of rows for each own slot and rank, as
        [own slots * ranks]. Both are valid until the next call."""
        self.sent[: len(rows)].copy_(rows)
        self.counts.copy_(counts)
        torch.ops.symm_mem.all_to_all_vdev_2d(self.sent, self.received, self.counts, self.places, self.name)
        return self.received, self.places[0]

    def give_back(self, results: Tensor) -> Tensor:
        """Return the results for the own rows, in the order in which the rows were sent. results: for the received
        rows."""
        self.results[: len(results)].copy_(results)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self.results, self.returned, self.places, self.returned_places, self.name
        )
        return self.returned


class Symmetric(FixedDispatch):
    """A token is sent once for each of its experts. Its results are added up on its original rank, in the order in
    which its experts were chosen."""

    def __init__(self, builder: Builder, ranks: ExpertRanks, num_experts: int) -> None:
        super().__init__(builder, ranks, num_experts)
        self.buffer: Any = ranks.buffer
        self.all_bounds = torch.arange(len(self.slots.experts) + 1, device=builder.device)

    def send_fixed(
        self, x: Tensor, slots: Tensor, weights: Tensor, num_tokens: int, room: int, adapters: Tensor | None
    ) -> Sent:
        return _Passing(self, x, slots, weights, num_tokens, room)


class _Passing(Sent):
    def __init__(
        self, dispatch: Symmetric, x: Tensor, slots: Tensor, weights: Tensor, num_tokens: int, room: int
    ) -> None:
        self.dispatch = dispatch
        self.weights = weights
        self.num_tokens = num_tokens
        rows, offsets, self.order = dispatch.kernels.sort_by_expert(x, slots, dispatch.all_bounds)
        received, counts = dispatch.buffer.dispatch(rows, offsets.diff())
        most = dispatch.group.size * room * min(slots.shape[1], dispatch.count)
        self.rows = received[:most]
        of_slots = counts.view(dispatch.count, dispatch.group.size).sum(1)
        self.offsets = torch.nn.functional.pad(of_slots.cumsum(0), (1, 0))

    def receive(self) -> Routed:
        rows = torch.arange(len(self.rows), device=self.rows.device)
        of_rows = torch.searchsorted(self.offsets[1:], rows, right=True)
        return Routed(self.rows, self.offsets, lambda: (rows, of_rows))

    def collect(self, out: Tensor) -> Tensor:
        dispatch = self.dispatch
        results = dispatch.buffer.give_back(out)[: len(self.order)]
        combined = dispatch.kernels.combine_experts(results, self.order, self.weights)
        return dispatch.summand(combined, self.num_tokens)
