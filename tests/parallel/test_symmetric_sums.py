"""When GPUs add up through symmetric memory, and when NCCL does. The memory and its sums are stand-ins on the CPU."""

from __future__ import annotations

import contextlib
import logging
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
    """Two ranks, of which the other one does what this one does."""

    def minimum(self, value: int) -> int:
        return value


GROUP: Any = Group(0, 2, SimpleNamespace(group_name="tp"), capturable=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs that can read each other's memory. Its fields are changed by tests."""
    machine = SimpleNamespace(peers=True, sums=lambda x: 2 * x, met=[], summed=[])

    def add_up(shown: Tensor, operation: str, name: str, out: Tensor) -> None:
        assert (operation, name) == ("sum", "tp")
        assert shown.untyped_storage().data_ptr() == machine.met[0].untyped_storage().data_ptr()
        assert shown.shape == out.shape
        machine.summed.append(out.shape)
        out.copy_(machine.sums(shown))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: machine.peers)
    monkeypatch.setattr(memory, "empty", lambda *size, dtype, device: torch.empty(*size, dtype=dtype, device=device))
    monkeypatch.setattr(memory, "rendezvous", lambda buffer, group: machine.met.append(buffer))
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", add_up, raising=False)
    return machine


def test_small_sums_take_symmetric_memory_and_others_take_nccl(machine: SimpleNamespace) -> None:
    group = with_symmetric_sums(GROUP, CPU, torch.bfloat16)
    assert isinstance(group.shortcut, SymmetricSums)
    assert group.capturable
    machine.summed.clear()
    x = torch.ones(32, 4096, dtype=torch.bfloat16)  # just as large as the buffer
    assert group.all_reduce(x) is x
    assert bool((x == 2).all())
    assert machine.summed == [(32, 4096)]
    for other in (
        torch.ones(33, 4096, dtype=torch.bfloat16),
        torch.ones(32, 8),  # another type
        torch.ones(3, 5, dtype=torch.bfloat16),  # no multiple of 16 bytes
        torch.ones(16, 16, dtype=torch.bfloat16).t()[1:],
        torch.ones(8, 8, dtype=torch.bfloat16, device="meta"),
    ):
        assert not group.shortcut.all_reduce(other)
    assert len(machine.summed) == 1


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
