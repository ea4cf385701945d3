"""The mesh: the groups of ranks to which one rank belongs, and the collectives of each group."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are exported, by assignments

from quire.parallel.sizes import AXES, MeshSizes


@dataclass
class Exchange:
    """An all-to-all in progress. out: the tensor that this rank receives, valid after `wait`."""

    out: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Return the received tensor. Waits for it on a CPU; on a GPU, later work waits."""
        if self.work is not None:
            self.work.wait()
        return self.out


class Shortcut:
    """Exchanges some tensors faster than torch's collectives. Each method returns False for tensors that it does not
    support; all ranks return the same. The base class supports none."""

    def all_reduce(self, x: Tensor) -> bool:
        """Sum x over the ranks, in place."""
        return False

    def reduce_scatter(self, x: Tensor, out: Tensor) -> bool:
        """Sum x over the ranks, and write this rank's share of the rows to `out`."""
        return False

    def all_gather(self, x: Tensor, out: Tensor) -> bool:
        """Write the rows of all ranks to `out`. x: this rank's rows."""
        return False


@dataclass(frozen=True)
class Passing:
    """Two tensors in transit, one to another rank and one from another rank. Keeps the sent tensor alive."""

    works: Sequence[dist.Work] = ()
    sent: Tensor | None = None

    def wait(self) -> None:
        """Wait for both tensors on a CPU; on a GPU, later work waits."""
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class Communicator:
    """The collectives of one group of ranks. In a group of one, each is the identity. rank: this rank's number in the
    group. capturable: whether recorded steps and CUDA graphs can contain its sums and gathers."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    capturable: bool = field(default=False, kw_only=True)
    shortcut: Shortcut = field(default=Shortcut(), kw_only=True)

    def share(self, total: int) -> tuple[int, int]:
        """Return this rank's part [start, stop) of `total` items. Parts are equal, except that the last ones may be
        short or empty."""
        part = -(-total // self.size)
        return min(self.rank * part, total), min((self.rank + 1) * part, total)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place."""
        if self.size > 1 and x.numel() and not self.shortcut.all_reduce(x):
            dist.all_reduce(x, group=self.group)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, and return this rank's share of the rows. x: [rows, columns] -> [own rows, columns]"""
        if self.size == 1:
            return x
        start, stop = self.share(len(x))
        out = x.new_empty(stop - start, x.shape[1])
        if not x.numel() or self.shortcut.reduce_scatter(x, out):
            return out
        part = -(-len(x) // self.size)
        out = x.new_empty(part, x.shape[1])
        run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the name before torch 2.13
        run(out, _padded(x, part * self.size), group=self.group)
        return out[: stop - start]

    def all_gather_rows(self, x: Tensor, total: int) -> Tensor:
        """Return the rows of all ranks. x: this rank's rows, [own rows, columns] -> [total, columns]"""
        if self.size == 1:
            return x
        out = x.new_empty(total, x.shape[1])
        if not out.numel() or self.shortcut.all_gather(x, out):
            return out
        part = -(-total // self.size)
        out = x.new_empty(part * self.size, x.shape[1])
        run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        run(out, _padded(x, part), group=self.group)
        return out[:total]

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with rank 0's x."""
        if self.size > 1:
            dist.broadcast(x, group_src=0, group=self.group)
        return x

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        """Concatenate the ranks' parts along the last dimension; `total` is its whole size. x: [rows, part]."""
        if self.size == 1:
            return x
        part = -(-total // self.size)
        padded = x if x.shape[-1] == part else torch.nn.functional.pad(x, (0, part - x.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)[..., :total]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        """Start to send the first sent[0] rows of x to rank 0, the next sent[1] rows to rank 1, and so on.

        received: the number of rows from each rank; the result contains them in this order. x must not change until the
        exchange is completed.
        """
        if self.size == 1:
            return Exchange(x)
        out = x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self.group, async_op=True)
        return Exchange(out, work)

    def gather_equal(self, x: Tensor) -> Exchange:
        """Start to gather the rows of all ranks, of which each has equally many. x: [rows, columns] -> [size * rows,
        columns]. x must not change until the exchange is completed."""
        if self.size == 1:
            return Exchange(x)
        out = x.new_empty(self.size * len(x), x.shape[1])
        run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        return Exchange(out, run(out, x.contiguous(), group=self.group, async_op=True))

    def pass_on(self, x: Tensor, to: int, out: Tensor, source: int) -> Passing:
        """Start to send x to one rank, and to receive `out` from another rank. Empty tensors are not sent.

        All ranks of the group must call it for the same pairs in the same order: NCCL completes one call after another.
        """
        x = x.contiguous()
        pairs = ((dist.isend, x, to), (dist.irecv, out, source))
        operations = [dist.P2POp(f, t, group=self.group, group_peer=peer) for f, t, peer in pairs if t.numel()]
        return Passing(dist.batch_isend_irecv(operations) if operations else [], x)

    def minimum(self, value: int) -> int:
        """Return the smallest of the ranks' values, so that all ranks make the same choice."""
        return self._agree(value, dist.ReduceOp.MIN)

    def maxima(self, values: Sequence[int]) -> list[int]:
        """Return the largest of the ranks' values at each place."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        largest: list[int] = tensor.tolist()
        return largest

    def total(self, value: int) -> int:
        """Return the sum of the ranks' values."""
        return self._agree(value, dist.ReduceOp.SUM)

    def each(self, value: int) -> tuple[int, ...]:
        """Return the value of each rank."""
        return tuple(self.total(value if rank == self.rank else 0) for rank in range(self.size))

    def _agree(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, operation, group=self.group)
        return int(tensor)

    def send(self, x: Tensor, to: int) -> dist.Work:
        """Start to send x to a rank of the group. x must not change until the returned work is completed."""
        work = dist.isend(x, group=self.group, group_dst=to)
        assert work is not None
        return work

    def receive(self, x: Tensor, source: int) -> None:
        """Receive x from a rank of the group. Waits for it on a CPU; on a GPU, later work waits."""
        dist.recv(x, group=self.group, group_src=source)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return x, contiguous, padded with rows of zeros."""
    return torch.nn.functional.pad(x, (0, 0, 0, rows - len(x))) if len(x) < rows else x.contiguous()


@dataclass(frozen=True)
class Mesh:
    """One rank's place among all ranks: its number, their number, and the rank's group along each axis.

    neighbours: the ranks that see the same GPUs as this one; None for all. machine: the ranks on this machine; None for
    all.
    """

    rank: int = 0
    size: int = field(default=1, kw_only=True)
    neighbours: range | None = field(default=None, kw_only=True)
    machine: frozenset[int] | None = field(default=None, kw_only=True)
    dp: Communicator = Communicator()
    pp: Communicator = Communicator()
    cp: Communicator = Communicator()
    tp: Communicator = Communicator()
    ep: Communicator = Communicator()
    replica: Communicator = Communicator()
    dcp: Communicator = Communicator()

    def device(self, kind: str) -> torch.device:
        """Return this rank's device. kind: "cpu" or "cuda". The GPUs of a machine are assigned to its ranks in turn."""
        if kind != "cuda":
            return torch.device(kind)
        number = self.rank if self.neighbours is None else self.neighbours.index(self.rank)
        return torch.device(kind, (torch.cuda.current_device() + number) % torch.cuda.device_count())

    def ranks_on_device(self, kind: str) -> int:
        """Return the number of ranks that share this rank's device."""
        devices = torch.cuda.device_count() if kind == "cuda" else 1
        if self.neighbours is None:
            return len(range(self.rank % devices, self.size, devices))
        return len(self.neighbours[self.neighbours.index(self.rank) % devices :: devices])

    @property
    def ranks_on_machine(self) -> int:
        return self.size if self.machine is None else len(self.machine)


def open_meeting(host: str, listener: socket.socket | None = None) -> TCPStore:
    """Open a store at which ranks meet. It listens on the address `host` of this machine; its attribute `port` is the
    port.

    listener: the socket to listen on, if one already exists.
    """
    listener = listener or socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(address: str, secret: bytes = b"", generation: int = 0) -> Store:
    """Connect to the store at an address: a torch store at host:port or, with a secret, that of a cluster's head.

    generation: of the ranks that meet at the head; their keys are separate from those of other generations.
    """
    if secret:
        from quire.parallel.rendezvous_store import RendezvousStore  # zmq is needed only with a cluster

        return RendezvousStore.at(address, secret, generation)
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False)


def backend(kind: str, ranks: int) -> str:
    """Return torch's name of the collectives that `ranks` ranks use on devices of this kind.

    If each rank has a GPU of its own, NCCL exchanges tensors between GPUs. It cannot share a GPU, so ranks on the same
    GPU exchange tensors through the host, with Gloo. Numbers on which the ranks agree are in CPU memory, so they always
    use Gloo.
    """
    if kind == "cuda" and torch.cuda.device_count() >= ranks and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def join(
    sizes: MeshSizes,
    rank: int,
    host: str,
    port: int,
    kind: str = "cpu",
    store: Store | None = None,
    neighbours: range | None = None,
    machine: frozenset[int] | None = None,
) -> Mesh:
    """Join the other ranks at the store that listens on host:port. Returns when all ranks have connected.

    kind: of the ranks' devices, "cpu" or "cuda". Groups of one rank need no process group. store: used when ranks of
    several machines meet. neighbours, machine: see Mesh.
    """
    if sizes.world == 1:
        return Mesh()
    name = backend(kind, sizes.replica if neighbours is None else len(neighbours))
    if store is None:
        store = TCPStore(host, port, is_master=False)
    else:
        store.set(f"backend/{rank}", name)
        if any(store.get(f"backend/{other}") != name.encode() for other in range(sizes.world)):
            name = "gloo"  # on some machine, ranks share GPUs
    dist.init_process_group(name, store=store, rank=rank, world_size=sizes.world)
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(sizes.world)): dist.group.WORLD}
    communicators = {}
    for axis in AXES:
        for ranks in sizes.groups(axis):
            if len(ranks) > 1 and tuple(ranks) not in groups:  # every rank must call new_group for every group
                groups[tuple(ranks)] = dist.new_group(ranks)
            if rank in ranks and len(ranks) > 1:
                group = groups[tuple(ranks)]
                communicators[axis] = Communicator(
                    ranks.index(rank), len(ranks), group, capturable=name.endswith("nccl")
                )
    return Mesh(rank, size=sizes.world, neighbours=neighbours, machine=machine, **communicators)
