"""The rules for the machine code of a kernel."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import triton

from benchmarks.gpu.machine_code import THREADS, MachineCode, Product, read
from quire.platform.gpu.cards import Card

WIDE = 16  # bytes that a thread should load at once
# Arguments of kernels with products that contain keys and values, or weights.
STREAMED = ("cache", "codes", "weight", "k", "v", "a", "b")
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
SMALL_TYPES = ("bf16", "f16", "i8", "f8E4M3FN", "f8E5M2", "u8")  # the types of inputs that tensor cores multiply


def programs_wanted(name: str, code: MachineCode) -> int:
    """Return the programs per processor that the plan assumes: two for decoding attention, since one loads while the
    other computes.
    """
    decodes = "attend" in name and max((dot.rows for dot in code.dots), default=0) < 32  # prompts of latents have 32
    return 2 if decodes else 1


def expected_product(name: str, card: Card, dot: Product) -> str:
    """Return the instruction for a product of 16- or 8-bit inputs. The rows of attention are queries. In linear layers,
    tokens may be the rows or the columns, so the smaller size is checked. Triton 3.6 always computes int8 products with
    mma.sync on 10.0, regardless of the tile.
    """
    if card.backend != "cuda" or not isinstance(card.capability, int):
        return "mma.sync"
    rows = dot.rows if "attend" in name else min(dot.rows, dot.columns)
    if card.capability // 10 == 9 and rows >= 64:
        return "wgmma"
    has_tcgen05 = card.capability // 10 == 10 and (dot.dtype != "i8" or _TRITON > (3, 6))
    return "tcgen05" if has_tcgen05 and rows >= 128 else "mma.sync"


def broken(name: str, code: MachineCode, card: Card) -> list[str]:
    """Return one line for each rule that the kernel violates.

    Models run in float32 on GPUs only to check results. Their products do not use tensor cores, and hold operands in
    registers. The rules on spills and narrow loads therefore do not apply to them.
    """
    found = []
    in_float32 = bool(code.dots) and all(dot.dtype == "f32" for dot in code.dots)
    if code.shared > card.shared_memory:
        found.append(f"shared memory: {code.shared} bytes, the card has {card.shared_memory}")
    wanted = programs_wanted(name, code)
    programs = code.programs(card)
    if programs < wanted and code.shared <= card.shared_memory:
        found.append(
            f"programs: {programs} a processor, {wanted} wanted ({code.shared} bytes shared, {code.registers} "
            f"registers, {code.warps} warps, {code.tensor_columns} columns of tensor memory)"
        )
    if code.spilled and not in_float32:
        found.append(f"spills: {code.spilled} bytes of local memory loads and stores")
    if code.float64:
        found.append(f"float64: {', '.join(code.float64[:4])}")
    for dot in code.dots:
        if dot.dtype in SMALL_TYPES:
            expected = expected_product(name, card, dot)
            if dot.kind != expected and not (expected == "mma.sync" and dot.kind != "fma"):
                sizes = f"{dot.rows} x {dot.columns} x {dot.inner}"
                found.append(f"product: {dot.kind} instead of {expected} for {sizes} of {dot.dtype}")
    if code.dots:
        if not code.products():
            found.append("product: no instruction of the machine code computes one")
        found += [] if in_float32 else _narrow(code)
    return found


def _narrow(code: MachineCode) -> list[str]:
    """Return the loads of keys, values and weights that are narrower than possible. Scales stored next to codes are
    excluded."""
    found = []
    if not any(load.argument in STREAMED for load in code.loads):
        names = ", ".join(sorted({load.argument for load in code.loads}))
        found.append(f"narrow loads: of these arguments, none is known to hold keys, values or weights: {names}")
    for argument in STREAMED:
        types = {load.dtype for load in code.loads if load.argument == argument}
        if not types:
            continue
        main = min(types, key=_bits)
        loads = {load: n for load, n in code.loads.items() if (load.argument, load.dtype) == (argument, main)}
        # In a small tile, such as the end of a head of 96, each thread has fewer bytes to load.
        share = min(load.count for load in loads) * _bits(main) // 8 // (code.warps * THREADS)
        narrow: Counter[int] = Counter()
        for load, times in loads.items():
            narrow[load.width] += times * (load.width < min(WIDE, share or WIDE))
        narrow = +narrow
        if narrow:
            listed = ", ".join(f"{n} of {width}" for width, n in sorted(narrow.items()))
            found.append(f"narrow loads of {argument} ({main}): {listed} bytes a thread")
    return found


def _bits(dtype: str) -> int:
    """f8E4M3FN -> 8, bf16 -> 16"""
    return int(number[0]) if (number := re.search(r"\d+", dtype)) else 0


def judged(launch: Any, card: Card) -> dict[str, Any]:
    """Return a compiled kernel as a line of the results."""
    code = read(launch.kernel)
    return {
        "name": launch.name,
        "hash": launch.kernel.hash[:10],
        "warps": code.warps,
        "shared": code.shared,
        "registers": code.registers,
        "spilled": code.spilled,
        "programs": code.programs(card),
        "tensor_columns": code.tensor_columns,
        "instructions": code.instructions.total(),
        "dots": [[d.kind, d.rows, d.columns, d.inner, d.dtype] for d in code.dots],
        "broken": broken(launch.name, code, card),
    }
