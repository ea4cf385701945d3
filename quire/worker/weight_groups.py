"""Receives weights from a trainer: the ranks join the trainer's process group, whose rank 0 broadcasts the tensors."""

import os
from collections.abc import Sequence
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from quire.checkpoints.weights import Checkpoint, Parts, check_shape, open_checkpoint, pick_of
from quire.cluster.addresses import own_address
from quire.layers.build import WeightSlot
from quire.messages.changes import JoinGroup, ReceiveWeights, TrainerOrder
from quire.messages.errors import error_text

_TYPES = ("float32", "float16", "bfloat16", "float64")


class ReceivedCheckpoint(Checkpoint):
    """A checkpoint of tensors that were received one by one. parts: the stored parts of each tensor, in host memory."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.names: dict[str, tuple[Sequence[int], dict[str, Tensor]]] = {}  # the shape, and the parts

    def add(self, name: str, tensor: Tensor) -> None:
        parts = {
            repr((shape, pick)): tensor[pick_of(shape, pick, tensor.shape)].to("cpu", copy=True)
            for shape, pick in self._parts.get(name, ())
        }
        self.names[name] = tensor.shape, parts

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.names[name][0])

    def read(self, slot: WeightSlot) -> Tensor:
        shape, parts = self.names[slot.name]
        check_shape(slot, shape)
        return parts[repr((slot.shape, slot.pick))]


class WeightGroups:
    """The trainers' process groups that this rank has joined, and the tensors received through them. They are
    independent of the groups in which ranks compute.

    device: of the model. rank: the number of this rank in its replica. directory, parts: of the model's checkpoint,
    which determines the allowed tensors.
    """

    def __init__(self, device: torch.device, rank: int, directory: Path, parts: Parts) -> None:
        self._device = device
        self._rank = rank
        self._directory = directory
        self._parts = parts
        self._groups: dict[str, tuple[Any, torch.device]] = {}  # with the device on which tensors arrive
        self.received = ReceivedCheckpoint(parts)

    def exchange(self, order: TrainerOrder) -> None:
        """Carry out an order. Raises ValueError if it fails."""
        if isinstance(order, JoinGroup):
            self.join(order)
        elif isinstance(order, ReceiveWeights):
            self.receive(order)
        else:
            self.leave(order.group_name)

    def join(self, order: JoinGroup) -> None:
        """Join a group, replacing an earlier one of this name. Raises ValueError if not all ranks join in time."""
        _check_place(order)
        backend = order.backend or ("nccl" if self._device.type == "cuda" else "gloo")
        if backend == "nccl" and self._device.type != "cuda":
            raise ValueError("backend: nccl needs a GPU; use gloo")
        if not self._parts:
            raise ValueError("load_format: only a model that was read from a checkpoint can be sent weights")
        self.leave(order.group_name)
        device = self._device if backend == "nccl" else torch.device("cpu")
        try:
            self._groups[order.group_name] = _join(order, order.rank_offset + order.first + self._rank, device), device
        except (RuntimeError, OSError) as error:
            problem = f"the group {order.group_name!r} was not joined in {order.timeout:g} s"
            raise ValueError(f"{problem}: {error_text(error).splitlines()[0]}") from error

    def leave(self, name: str) -> None:
        """Leave a group if the rank is in it. The trainer's next call fails."""
        self._groups.pop(name, None)

    def forget(self) -> None:
        """Drop the received tensors."""
        self.received = ReceivedCheckpoint(self._parts)

    def receive(self, order: ReceiveWeights) -> None:
        """Receive tensors one after another. If this raises ValueError, the rank leaves the group, since the trainer
        may still be sending unread tensors."""
        if order.group_name not in self._groups:
            raise ValueError(f"group_name: there is no group {order.group_name!r}; call init_weights_update_group")
        try:
            self._check(order)
            self._receive(order)
        except ValueError:
            self.leave(order.group_name)
            raise

    def _check(self, order: ReceiveWeights) -> None:
        """Raises ValueError for tensors that are not in the model's checkpoint. All ranks refuse the same tensors."""
        if not len(order.names) == len(order.dtypes) == len(order.shapes):
            raise ValueError("names, dtypes and shapes should have the same length")
        checkpoint = open_checkpoint(self._directory)
        for name, dtype, shape in zip(order.names, order.dtypes, order.shapes, strict=True):
            if name not in checkpoint.names:
                raise ValueError(f"names: the model's checkpoint has no tensor {name[:200]!r}")
            if (wanted := list(checkpoint.shape(name))) != shape:
                raise ValueError(f"shapes: tensor {name} has {wanted}, got {shape}")
            if dtype.removeprefix("torch.") not in _TYPES:
                raise ValueError(f"dtypes: tensor {name} should have one of {', '.join(_TYPES)}, got {dtype[:200]!r}")

    def _receive(self, order: ReceiveWeights) -> None:
        group, device = self._groups[order.group_name]
        for name, dtype, shape in zip(order.names, order.dtypes, order.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            try:
                group.broadcast([tensor], dist.BroadcastOptions()).wait()
            except RuntimeError as error:
                del group  # the error keeps this frame, which would keep the group's connections open
                raise ValueError(f"tensor {name} has not come: {error_text(error).splitlines()[0]}") from error
            self.received.add(name, tensor)


def _check_place(order: JoinGroup) -> None:
    """Raises ValueError for an order that is wrong; all ranks then refuse it."""
    least = order.rank_offset + order.ranks
    for field, fits, wanted in (
        ("master_address", _is_address(order.master_address), "an IP address or localhost"),
        ("master_port", 0 < order.master_port < 65536, "between 1 and 65535"),
        ("rank_offset", order.rank_offset > 0, "at least 1, since rank 0 is the trainer"),
        (
            "world_size",
            order.world_size >= least,
            f"at least {least}, since {order.ranks} ranks begin at {order.rank_offset}",
        ),
        ("backend", order.backend in (None, "gloo", "nccl"), "gloo or nccl"),
        ("timeout", 0 < order.timeout <= 3600, "more than 0 and at most 3600 seconds"),
    ):
        if not fits:
            raise ValueError(f"{field} should be {wanted}, got {str(getattr(order, field))[:200]!r}")


def _is_address(text: str) -> bool:
    try:
        return text == "localhost" or bool(ip_address(text))
    except ValueError:
        return False


def _join(order: JoinGroup, rank: int, device: torch.device) -> Any:
    """Return the process group. Its keys in the store are those of torch's own function for named groups."""
    store = TCPStore(order.master_address, order.master_port, is_master=False, timeout=timedelta(seconds=order.timeout))
    name = order.group_name
    keys = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    make: Any
    options: Any
    if device.type == "cpu":
        make, options = ProcessGroupGloo, ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(order.master_address))]
    else:
        from torch.distributed import ProcessGroupNCCL  # not in torch for CPUs

        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # read by the constructor: `wait` raises errors
        torch.cuda.set_device(device)
        make = ProcessGroupNCCL
        options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=order.timeout)
    return make(keys, rank, order.world_size, options)
