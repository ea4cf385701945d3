"""Runs the inline PTX of kernels on arrays, for Triton's interpreter, which cannot.

It knows the instructions that Quire's kernels use. A register is an array of uint32, with one element for each use of
the block of instructions.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def floats_of(halves: NDArray[np.uint16], name: str) -> NDArray[np.float64]:
    """Return the values of 16-bit floats. name: "f16" or "bf16"."""
    if name == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def halves_of(values: NDArray[np.float64], name: str) -> NDArray[np.uint16]:
    """Return the nearest 16-bit floats, ties to even."""
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    rounded = torch.from_numpy(np.ascontiguousarray(values)).float().to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Permute bytes: each of the selector's four lowest nibbles picks one of the eight bytes of a and b."""
    joined = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(joined)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        assert not np.any(nibble & 8), "prmt: replication of the sign is not supported"
        byte = (joined >> (nibble.astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
        out |= byte << np.uint64(8 * place)
    return out.astype(np.uint32)


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """The bitwise function of three operands whose truth table is `table`."""
    out = np.zeros_like(a)
    for row in range(8):
        if int(table.flat[0]) >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def _fma(name: str) -> Callable[[Words, Words, Words], Words]:
    def run(a: Words, b: Words, c: Words) -> Words:
        wide = [floats_of(np.ascontiguousarray(x).view(np.uint16), name) for x in (a, b, c)]
        return halves_of(wide[0] * wide[1] + wide[2], name).view(np.uint32)

    return run


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a.copy(),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.f16x2": _fma("f16"),
    "fma.rn.bf16x2": _fma("bf16"),
}


def run(assembly: str, inputs: list[Words], outputs: int) -> list[Words]:
    """Run a block of PTX. Its operands are $0, $1 ...: the outputs first, then the inputs. Raises NotImplementedError
    for an unknown instruction."""
    size = len(inputs[0])
    registers = {f"${outputs + number}": words for number, words in enumerate(inputs)}

    def value(operand: str) -> Words:
        if operand in registers:
            return registers[operand]
        return np.full(size, int(operand, 0) & 0xFFFFFFFF, dtype=np.uint32)

    for statement in assembly.strip().strip("{}").split(";"):
        line = statement.strip()
        if not line or line.startswith(".reg"):
            continue
        name, _, operands = line.partition(" ")
        if name not in _INSTRUCTIONS:
            raise NotImplementedError(f"PTX instruction {name}")
        target, *sources = re.split(r"\s*,\s*", operands.strip())
        registers[target] = _INSTRUCTIONS[name](*map(value, sources))
    return [registers[f"${number}"] for number in range(outputs)]


def elementwise(
    assembly: str, constraints: str, operands: list[NDArray[np.generic]], dtype: np.dtype, pack: int
) -> NDArray[np.generic]:
    """Apply PTX to arrays of equal shape, `pack` elements at a time, as tl.inline_asm_elementwise does.

    dtype: that of the result's elements, whose 32-bit registers are the block's outputs.
    """
    outputs = sum(part.strip().startswith("=") for part in constraints.split(","))
    inputs: list[Words] = []
    for operand in operands:
        words = np.ascontiguousarray(operand).reshape(-1, pack).view(np.uint32)
        inputs += [np.ascontiguousarray(words[:, number]) for number in range(words.shape[1])]
    results = np.stack(run(assembly, inputs, outputs), axis=1)
    return np.ascontiguousarray(results).view(dtype).reshape(operands[0].shape)
