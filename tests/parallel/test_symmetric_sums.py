"""When GPUs add up through symmetric memory, and when NCCL does. The memory and its sums are stand-ins on the CPU."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as memory
from torch import Tensor

from quire.parallel.mesh import Communicator
from quire.parallel.symmetric_sums import SymmetricSums, with_symmetric_sums

CPU = torch.device("cpu")


class Group(Communicator):
    """Ranks of which the others do what this one does."""

    def minimum(self, value: int) -> int:
        return value


GROUP: Any = Group(0, 2, SimpleNamespace(group_name="tp"), capturable=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs that can read each other's memory. Its fields are changed by tests. used: the sums, by kernel."""
    machine = SimpleNamespace(peers=True, sums=lambda x: 2 * x, met=[], summed=[], used=[], multicast=0)

    def add_up(kernel: str, shown: Tensor, operation: str, name: str, out: Tensor) -> None:
        assert (operation, name) == ("sum", "tp")
        assert shown.untyped_storage().data_ptr() == machine.met[0].untyped_storage().data_ptr()
        assert shown.shape == out.shape
        machine.summed.append(out.shape)
        machine.used.append(kernel)
        out.copy_(machine.sums(shown))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: machine.peers)
    monkeypatch.setattr(memory, "empty", lambda *size, dtype, device: torch.empty(*size, dtype=dtype, device=device))

    def meet(buffer: Tensor, group: Any) -> SimpleNamespace:
        machine.met.append(buffer)
        return SimpleNamespace(multicast_ptr=machine.multicast)

    monkeypatch.setattr(memory, "rendezvous", meet)
    for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_out"):
        monkeypatch.setattr(torch.ops.symm_mem, name, partial(add_up, name), raising=False)
    in_place = partial(add_up, "multimem_all_reduce_")
    monkeypatch.setattr(
        torch.ops.symm_mem, "multimem_all_reduce_", lambda x, how, name: in_place(x, how, name, x), raising=False
    )
    return machine


def ones(rows: int) -> Tensor:
    return torch.ones(rows, 4096, dtype=torch.bfloat16)


def test_the_kernel_depends_on_the_size(machine: SimpleNamespace) -> None:
    group = with_symmetric_sums(GROUP, CPU, torch.bfloat16)
    assert isinstance(group.shortcut, SymmetricSums)
    assert group.capturable
    machine.summed.clear()
    machine.used.clear()
    for rows in (32, 33, 4096):  # 256 KiB, more, and as large as the buffer
        x = ones(rows)
        assert group.all_reduce(x) is x
        assert bool((x == 2).all())
    assert machine.summed == [(32, 4096), (33, 4096), (4096, 4096)]
    assert machine.used == ["one_shot_all_reduce_out", "two_shot_all_reduce_out", "two_shot_all_reduce_out"]


@pytest.mark.parametrize(
    ("ranks", "multicast", "kernels"),
    [
        (2, 7, ["one_shot_all_reduce_out", "two_shot_all_reduce_out"]),
        (4, 7, ["one_shot_all_reduce_out", "multimem_all_reduce_"]),
        (6, 7, ["one_shot_all_reduce_out", "multimem_all_reduce_"]),
        (8, 0, ["one_shot_all_reduce_out", "two_shot_all_reduce_out"]),
        (6, 0, ["one_shot_all_reduce_out"]),  # torch has no kernel for larger tensors
    ],
)
def test_larger_sums_take_multicast_memory_or_two_shots(machine, ranks, multicast, kernels) -> None:
    machine.sums, machine.multicast = (lambda x: ranks * x), multicast
    group = with_symmetric_sums(Group(0, ranks, SimpleNamespace(group_name="tp"), capturable=True), CPU, torch.bfloat16)
    machine.used.clear()
    supported = [group.shortcut.all_reduce(ones(rows)) for rows in (1, 64)]
    assert machine.used == kernels
    assert supported == [True, len(kernels) == 2]


def test_wrong_larger_sums_are_left_to_nccl(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_out", fails)
    with caplog.at_level(logging.INFO, logger="quire"):
        group = with_symmetric_sums(GROUP, CPU, torch.bfloat16)
    assert "above 256 KiB with NCCL: no such driver" in caplog.text
    assert group.shortcut.all_reduce(ones(32))
    assert not group.shortcut.all_reduce(ones(33))


def test_nccl_computes_the_sums_that_are_not_supported(machine: SimpleNamespace) -> None:
    group = with_symmetric_sums(GROUP, CPU, torch.bfloat16)
    machine.summed.clear()
    for other in (
        ones(4097),
        ones(8).view(-1)[4:132],  # not aligned
        torch.ones(32, 8),  # another type
        torch.ones(3, 5, dtype=torch.bfloat16),  # no multiple of 16 bytes
        torch.ones(16, 16, dtype=torch.bfloat16).t()[1:],
        torch.ones(8, 8, dtype=torch.bfloat16, device="meta"),
    ):
        assert not group.shortcut.all_reduce(other)
    assert not machine.summed


def fails(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("no such driver\nand more")


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({"peers": False}, torch.bfloat16, "cannot read each other's memory"),
        ({}, torch.float16, "the type has no such sums"),
        ({"sums": lambda x: x}, torch.bfloat16, ""),  # a wrong sum
        ({"sums": fails}, torch.bfloat16, "no such driver"),
        ({"empty": fails}, torch.bfloat16, "no such driver"),
        ({"rendezvous": fails}, torch.bfloat16, "no such driver"),
    ],
)
def test_if_anything_fails_all_sums_take_nccl(
    machine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    dtype: torch.dtype,
    reason: str,
) -> None:
    for name, value in change.items():
        if hasattr(memory, name):
            monkeypatch.setattr(memory, name, value)
        else:
            setattr(machine, name, value)
    with caplog.at_level(logging.INFO, logger="quire"):
        assert with_symmetric_sums(GROUP, CPU, dtype) is GROUP
    assert "The ranks add up with NCCL alone: " in caplog.text
    assert reason in caplog.text
    assert "and more" not in caplog.text


def test_ranks_without_nccl_do_not_ask_for_it(machine: SimpleNamespace) -> None:
    for group in (Communicator(), Communicator(0, 2)):  # one rank; ranks that share a GPU
        assert with_symmetric_sums(group, CPU, torch.bfloat16) is group
    assert not machine.met
