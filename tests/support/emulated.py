"""Kernels for another processor than this one, in an emulator.

A process of qemu-user (emulated.cpp) loads the library. Each call sends it all memory that the arguments point into,
and takes back what that has become. Tests then compute with these kernels as with those of this processor.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

DRIVER = Path(__file__).with_suffix(".cpp")
CROSS_COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PROCESSORS = {"neon": "cortex-a72", "neon-dotprod": "neoverse-n1", "neon-bf16": "max"}  # as the emulator calls them


def need_emulator() -> None:
    """Skips the test where the cross compiler or the emulator is missing."""
    for program, package in ((CROSS_COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"needs Debian's package {package}")


class EmulatedLibrary:
    """In place of a quire.ops.cpu.build.Library. instruction_set: that of the library at `path`, a key of PROCESSORS.

    Functions find the memory of tensors, structures and arrays whose addresses were taken (data_ptr, addressof) since
    this was made. A call is three lists of numbers: regions of memory with their contents, the places of pointers in
    these regions, and arguments.
    """

    def __init__(self, path: Path, instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = path.with_suffix(".driver")
        subprocess.run([CROSS_COMPILER, "-std=c++17", "-O1", str(DRIVER), "-o", str(driver), "-ldl"], check=True)
        command = [EMULATOR, "-cpu", PROCESSORS[instruction_set], "-L", SYSTEM, str(driver), str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._starts: list[int] = []  # addresses of what is known, in order
        self._known: dict[int, Any] = {}  # storages, structures and arrays, which must not be freed
        data_ptr, addressof = torch.Tensor.data_ptr, ctypes.addressof

        def noted_data_ptr(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            self._note(storage.data_ptr(), storage)
            return data_ptr(tensor)

        def noted_addressof(structure: Any) -> int:
            self._note(addressof(structure), structure)
            return addressof(structure)

        monkeypatch.setattr(torch.Tensor, "data_ptr", noted_data_ptr)
        monkeypatch.setattr(ctypes, "addressof", noted_addressof)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def function(self, name: str, arguments: str) -> Callable[..., None]:
        def call(*values: Any) -> None:
            regions: dict[int, int] = {}  # sizes by address
            pointers: list[int] = []
            words: list[int] = []
            for letter, value in zip(arguments, values, strict=True):
                if letter == "p" and value:
                    self._add(value, regions, pointers)
                word = struct.unpack("<I", struct.pack("<f", value))[0] if letter == "f" else int(value or 0)
                words += [ord(letter), word % 2**64]
            message = [_numbers(len(name)), name.encode(), _numbers(len(regions))]
            for address, size in regions.items():
                message += [_numbers(address, size), ctypes.string_at(address, size)]
            message.append(_numbers(len(pointers), *pointers, len(values), *words))
            self._exchange(name, b"".join(message), regions)

        return call

    def _exchange(self, name: str, message: bytes, regions: dict[int, int]) -> None:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(message)
        to.flush()
        for address, size in regions.items():
            data = back.read(size)
            assert len(data) == size, f"{name} ended the emulated process with {self._process.wait()}"
            ctypes.memmove(address, data, size)

    def _note(self, address: int, memory: Any) -> None:
        if address and address not in self._known:
            self._known[address] = memory
            self._starts.insert(bisect_right(self._starts, address), address)

    def _add(self, address: int, regions: dict[int, int], pointers: list[int]) -> None:
        """Add the storage, structure or array that holds the address, and what the latter two point to.

        The first number of an array is a pointer, as in quire.attention.base.Selection.
        """
        start = self._starts[bisect_right(self._starts, address) - 1]
        memory = self._known[start]
        if isinstance(memory, torch.UntypedStorage):
            assert address <= start + memory.nbytes(), "memory of a tensor whose address was not taken"
            regions[start] = memory.nbytes()
            return
        regions[start] = ctypes.sizeof(memory)
        places = (
            {0: memory[0]}
            if isinstance(memory, ctypes.Array)
            else {
                getattr(type(memory), field).offset: getattr(memory, field)
                for field, kind, *_ in memory._fields_
                if kind is ctypes.c_void_p
            }
        )
        for offset, value in places.items():
            pointers.append(start + offset)
            if value:
                self._add(value, regions, pointers)


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)
