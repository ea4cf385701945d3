"""Reads a compiled kernel's resources and operations from its machine code.

    with stand_in(CARDS["sm_90"]) as device, device.traced() as launches:
        ...
    code = read(launches[0].kernel)
    code.shared, code.registers, code.spilled, code.programs(CARDS["sm_90"]), code.widths(), code.products()

Registers and instructions of NVIDIA's cards come from the cubin (SASS, as printed by cuobjdump, which Triton includes).
Triton's first representation (TTIR) shows which argument a load reads, and PTX refers to the same source lines. For AMD
cards, the assembler text is read.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from quire.platform.gpu.cards import Card

_WARPGROUP = re.compile(r"^[HIQ]GMMA")
_TENSOR_MEMORY = re.compile(r"^UTC\w*MMA")
_WARP = re.compile(r"^([HIQOD]MMA|v_s?mfma)")
_FLOAT64 = re.compile(
    r"^(D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|F2F\.F64|F2F\.F32\.F64|[FI]2[FI]\S*F64|MUFU\.\w*64H|v_\w+_f64)"
)
_TENSOR_COLUMNS = 512  # columns of a processor's tensor memory, with compute capability 10.0
THREADS = 32  # of a warp
_SCHEDULERS = 4  # of a processor; each has a quarter of the registers


@dataclass(frozen=True)
class Loop:
    """A loop, without its inner loops. instructions: the opcodes (with modifiers) of one iteration of a warp, with all
    branches taken. depth: 1 for an outermost loop. bytes_loaded: from global memory, by a warp in one iteration."""

    instructions: Counter[str]
    depth: int
    bytes_loaded: int
    is_innermost: bool = True

    def share_of_products(self) -> float:
        return sum(n for name, n in self.instructions.items() if _product(name)) / max(1, self.instructions.total())


@dataclass(frozen=True)
class Product:
    """A matrix product of Triton's source, as compiled: the method, and the sizes of one program's tile."""

    kind: str
    rows: int
    columns: int
    inner: int
    dtype: str


class Load(NamedTuple):
    """A load of Triton's source: its argument and width. count: elements of the tile that a program loads; 0 if
    unknown. width: bytes that a thread loads at once.
    """

    argument: str
    dtype: str
    count: int
    width: int


@dataclass(frozen=True)
class MachineCode:
    """Sizes are bytes. registers: of a thread. spilled: bytes of local memory loads and stores.

    tensor_columns: columns of tensor memory (compute capability 10.0). loads: how often each load occurs. float64:
    instructions with float64, as SASS or PTX.
    """

    kernel: str
    target: str
    warps: int
    shared: int
    registers: int
    spilled: int
    instructions: Counter[str]
    loops: tuple[Loop, ...]
    tensor_columns: int
    dots: tuple[Product, ...]
    loads: Counter[Load]
    float64: tuple[str, ...]

    def programs(self, card: Card) -> int:
        """Return how many programs fit on one of the card's processors, given their registers, shared memory and
        warps."""
        limits = [card.programs, card.warps // self.warps]
        if card.backend == "cuda":
            of_a_warp = -(-self.registers * card.warp_size // 256) * 256  # registers are allocated in units of 256
            if of_a_warp:
                limits.append(card.registers // _SCHEDULERS // of_a_warp * _SCHEDULERS // self.warps)
        elif self.registers:
            limits.append(512 // (-(-self.registers // 8) * 8) * _SCHEDULERS // self.warps)
        if needed := self.shared + card.reserved_memory:
            limits.append(card.processor_memory // needed)
        if self.shared > card.shared_memory:
            return 0
        if self.tensor_columns:
            limits.append(_TENSOR_COLUMNS // self.tensor_columns)
        return min(limits)

    def widths(self) -> Counter[int]:
        """Return how many instructions load 1, 2, 4, 8, 16 or 32 bytes per thread from global memory."""
        widths: Counter[int] = Counter()
        for name, count in self.instructions.items():
            if width := _loaded(name):
                widths[width] += count
        return widths

    def products(self) -> frozenset[str]:
        """Return the kinds of instructions that compute matrix products: wgmma, tcgen05, mma.sync (mfma on AMD) or
        fma."""
        kinds = {_product(name) for name in self.instructions} - {""}
        return frozenset(kinds | {"fma" for dot in self.dots if dot.kind == "fma"})

    def hot(self) -> tuple[Loop, ...]:
        """Return the innermost loops, those with the most instructions first."""
        return tuple(sorted((x for x in self.loops if x.is_innermost), key=lambda x: -x.instructions.total()))


def read(kernel: Any) -> MachineCode:
    """Return the machine code of a kernel compiled by Triton. Kernels with equal machine code are parsed once."""
    asm = kernel.asm
    metadata = kernel.metadata
    target = metadata.target
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    is_cuda = target.backend == "cuda"
    return _read(
        asm["cubin"] if is_cuda else asm["amdgcn"],
        asm["ptx"] if is_cuda else asm["amdgcn"],
        asm["ttir"],
        asm["ttgir"],
        metadata.name,
        name,
        metadata.num_warps,
        metadata.shared,
        getattr(metadata, "tmem_size", 0) or 0,
    )


@lru_cache(maxsize=4096)
def _read(
    machine_code: bytes | str,
    assembler: str,
    ttir: str,
    ttgir: str,
    kernel: str,
    target: str,
    warps: int,
    shared: int,
    tensor_columns: int,
) -> MachineCode:
    if isinstance(machine_code, bytes):
        sass = _disassembled(machine_code)
        registers = max(map(int, re.findall(r"REG:(\d+)", sass)))
        lines = list(_sass(sass))
        spilled = sum(_width(line.opcode, 4) for line in lines if line.opcode.startswith(("LDL", "STL")))
    else:
        lines = list(_amdgcn(machine_code))
        registers = int(_found(r"\.vgpr_count:\s+(\d+)", machine_code)) + int(
            _found(r"\.agpr_count:\s+(\d+)", machine_code)
        )
        spilled = int(_found(r"\.private_segment_fixed_size:\s+(\d+)", machine_code))
    instructions = Counter(line.opcode for line in lines if line.opcode not in ("NOP", "s_nop"))
    return MachineCode(
        kernel,
        target,
        warps,
        shared,
        registers,
        spilled,
        instructions,
        _loops(lines),
        tensor_columns,
        _dots(ttgir),
        _loads(ttir, assembler),
        _float64(instructions, assembler),
    )


def _found(pattern: str, text: str) -> str:
    return found[1] if (found := re.search(pattern, text)) else "0"


def _program(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def _disassembled(cubin: bytes) -> str:
    """Return the assembler text of a kernel. The text is cached in a folder, since many cases share kernels."""
    folder = platformdirs.user_cache_path("quire") / "benchmarks" / "disassembled"
    kept = folder / f"{hashlib.sha256(cubin).hexdigest()}.gz"
    if kept.exists():
        return gzip.decompress(kept.read_bytes()).decode()
    text = _disassemble(cubin)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = kept.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(gzip.compress(text.encode(), 1))
    temporary.replace(kept)
    return text


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_program("cuobjdump"), "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---- instructions


@dataclass(frozen=True)
class _Line:
    """An instruction. targets: where it may jump. falls: whether execution may continue with the next instruction."""

    address: int
    opcode: str
    targets: tuple[int, ...] = ()
    falls: bool = True


_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?);", re.MULTILINE)


def _sass(text: str) -> Iterable[_Line]:
    meetings: dict[str, int] = {}  # by BSSY's register: the target of BSYNC with this register
    for address, predicate, opcode, operands in _SASS.findall(text):
        target = re.search(r"(?<![\w\[+])0x([0-9a-f]+)\s*$", operands)
        base = opcode.split(".")[0]
        at = int(address, 16)
        if base == "BSSY" and target:
            meetings[operands.split(",")[0]] = int(target[1], 16)
        if base in ("BRA", "JMP") and target:
            is_sure = not predicate and "," not in operands
            yield _Line(at, opcode, (int(target[1], 16),), not is_sure)
        elif base == "BSYNC":
            meeting = meetings.get(operands.split(",")[0].strip())
            yield _Line(at, opcode, () if meeting is None else (meeting,))
        else:
            yield _Line(at, opcode, (), bool(predicate) or base not in ("EXIT", "RET", "BRX"))


def _amdgcn(text: str) -> Iterable[_Line]:
    body = text.split("s_endpgm")[0] + "s_endpgm"
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in body.splitlines():
        if label := re.match(r"(\.?\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s+([a-z]+_\w+)\s*(.*)", line):
            found.append((instruction[1], instruction[2]))
    for at, (opcode, operands) in enumerate(found):
        targets = tuple(labels[x] for x in operands.split()[:1] if x in labels) if "branch" in opcode else ()
        yield _Line(at, opcode, targets, opcode not in ("s_branch", "s_endpgm"))


def _product(opcode: str) -> str:
    if _WARPGROUP.match(opcode):
        return "wgmma"
    if _TENSOR_MEMORY.match(opcode):
        return "tcgen05"
    return "mma.sync" if _WARP.match(opcode) else ""


_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_AMD_SIZES = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _width(opcode: str, otherwise: int) -> int:
    return next((size for part in opcode.split(".")[1:] if (size := _SIZES.get(part))), otherwise)


def _loaded(opcode: str) -> int:
    """Return the bytes that a thread loads from global memory with this instruction."""
    if re.match(r"(LDG|LDGSTS)\b", opcode):
        return _width(opcode, 4)
    if re.match(r"(global|buffer|flat)_load_", opcode):
        return next((size for part in opcode.split("_") if (size := _AMD_SIZES.get(part))), 4)
    return 0


def _float64(instructions: Counter[str], assembler: str) -> tuple[str, ...]:
    in_code = {name for name in instructions if _FLOAT64.match(name)}
    return tuple(sorted(in_code | set(re.findall(r"^\s+(?:@!?%\w+\s+)?(\w[\w.]*\.f64\b)", assembler, re.MULTILINE))))


# ---- loops


def _loops(lines: list[_Line]) -> tuple[Loop, ...]:
    """Natural loops: a branch back to a block that dominates the branch."""
    if not lines:
        return ()
    index = {line.address: i for i, line in enumerate(lines)}
    starts = {0} | {index[t] for line in lines for t in line.targets if t in index}
    starts |= {i + 1 for i, line in enumerate(lines[:-1]) if line.targets or not line.falls}
    first = sorted(starts)
    block_of = {start: block for block, start in enumerate(first)}
    ends = [*first[1:], len(lines)]
    following = []
    for end in ends:
        last = lines[end - 1]
        ways = [block_of[index[t]] for t in last.targets if t in index]
        following.append(ways + ([block_of[end]] if last.falls and end in block_of else []))
    order = _order(following)
    parent = _dominators(following)
    bodies: dict[int, set[int]] = {}
    before: dict[int, list[int]] = {}
    for block in order:
        for after in following[block]:
            before.setdefault(after, []).append(block)
    for block in order:
        for head in following[block]:
            if _dominates(head, block, parent):
                body = bodies.setdefault(head, {head})
                waiting = [block]
                while waiting:
                    if (at := waiting.pop()) not in body:
                        body.add(at)
                        waiting += before.get(at, [])
    names_of = {
        head: Counter(line.opcode for block in body for line in lines[first[block] : ends[block]])
        for head, body in bodies.items()
    }
    bodies = {head: body for head, body in bodies.items() if not _waits(names_of[head])}
    loops = []
    for head, body in bodies.items():
        inner = [other for other_head, other in bodies.items() if other_head != head and other < body]
        depth = 1 + sum(body < other for other_head, other in bodies.items() if other_head != head)
        own = body.difference(*inner)
        names = Counter(line.opcode for block in own for line in lines[first[block] : ends[block]])
        loaded = sum(_loaded(name) * count for name, count in names.items()) * THREADS
        loops.append(Loop(names, depth, loaded, is_innermost=not inner))
    return tuple(loops)


def _waits(names: Counter[str]) -> bool:
    """Whether a loop only waits for a barrier."""
    return names.total() <= 6 and any("TRYWAIT" in name for name in names)


def _order(following: list[list[int]]) -> list[int]:
    """Return the reachable blocks in reverse postorder."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(following[0]))]
    while stack:
        block, ways = stack[-1]
        for way in ways:
            if way not in seen:
                seen.add(way)
                stack.append((way, iter(following[way])))
                break
        else:
            order.append(block)
            stack.pop()
    return order[::-1]


def _dominators(following: list[list[int]]) -> dict[int, int]:
    """Return the immediate dominator of each block (Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm)."""
    order = _order(following)
    rank = {block: i for i, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for way in following[block]:
            before[way].append(block)
    parent = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = -1
            for other in before[block]:
                if other not in parent:
                    continue
                if new < 0:
                    new = other
                while new != other:
                    while rank[new] > rank[other]:
                        new = parent[new]
                    while rank[other] > rank[new]:
                        other = parent[other]
            if parent.get(block) != new:
                parent[block], changed = new, True
    return parent


def _dominates(head: int, block: int, parent: dict[int, int]) -> bool:
    while block != head and block:
        block = parent[block]
    return block == head


# ---- Triton's own representations


Place = tuple[tuple[int, int], ...]  # (line, column) in the source, then those of the call

_DOT = re.compile(
    r"(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*) .*? : "
    r"(?:tensor|!ttg\.memdesc)<(\d+)x(\d+)x(\w+),.*?(?:\*|, )\s*(?:tensor|!ttg\.memdesc)<(\d+)x(\d+)x(\w+),(.*)"
)


def _dots(ttgir: str) -> tuple[Product, ...]:
    kinds = {"ttng.warp_group_dot": "wgmma", "tt.dot": "mma.sync"}
    dots = {}
    for operation, rows, inner, dtype, _, columns, _, rest in _DOT.findall(ttgir):
        kind = "tcgen05" if operation.startswith("ttng.tc_gen5") else kinds[operation]
        if kind == "mma.sync" and re.search(r"-> tensor<[^>]*#blocked", rest):
            kind = "fma"
        dots[Product(kind, int(rows), int(columns), int(inner), dtype)] = None
    return tuple(dots)


def _loads(ttir: str, assembler: str) -> Counter[Load]:
    """Return the loads in PTX."""
    arguments = _arguments_of_loads(ttir)
    found: Counter[Load] = Counter()
    place: Place = ()
    for line in assembler.splitlines():
        if location := re.match(
            r"\s+\.loc\s+\d+ (\d+) (\d+)(?:.*?(?:inlined_at \d+ |@\[ [\w.]+:)(\d+)[ :](\d+))?", line
        ):
            numbers = [int(x) for x in location.groups() if x]
            place = tuple(zip(numbers[::2], numbers[1::2], strict=True))
            continue
        width = 0
        if load := re.search(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b", line):
            width = int(load[1] or 1) * int(load[2]) // 8
        elif copy := re.search(r"\bcp\.async\.\w+\.shared\.global[\w.:]*\s+\[.*?\],\s*\[.*?\],\s*(\w+)", line):
            width = int(copy[1], 0)
        elif instruction := re.match(r"\s+((?:global|buffer)_load_\w+)", line):
            width = _loaded(instruction[1])
        if width:
            found[Load(*_nearest(arguments, place), width)] += 1
    return found


def _nearest(arguments: dict[Place, tuple[str, str, int]], place: Place) -> tuple[str, str, int]:
    """Return the load at this source position. Its lines may be shifted, since Triton's cache does not distinguish
    files that differ only in the lines before a kernel."""
    distances = {
        other: abs(other[0][0] - place[0][0])
        for other in arguments
        if place and [column for _, column in other] == [column for _, column in place]
    }
    best = min(distances, key=distances.__getitem__, default=None)
    return ("?", "?", 0) if best is None else arguments[best]


def _arguments_of_loads(ttir: str) -> dict[Place, tuple[str, str, int]]:
    """Return each load's argument, type and number of elements, by its source position (and that of the call)."""
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def resolved(text: str) -> list[tuple[int, int]]:
        if call := re.match(r"callsite\((#loc\d*) at (#loc\d*)\)", text):
            return resolved(places.get(call[1], "")) + resolved(places.get(call[2], ""))
        if file := re.match(r'".*?":(\d+):(\d+)', text):
            return [(int(file[1]), int(file[2]))]
        named = re.match(r'".*?"\((#loc\d*)\)', text)
        return resolved(places.get(named[1], "")) if named else []

    bases: dict[str, str] = {}
    found: dict[Place, tuple[str, str, int]] = {}
    for line in ttir.splitlines():
        if "tt.func public" in line:
            bases |= {name: name[1:] for name in re.findall(r"(%\w+): !tt\.ptr", line)}
        if load := re.search(r"tt\.load (%[\w#]+).*: (?:tensor<)?([\dx]*)!tt\.ptr<(\w+)>.* loc\((#loc\d*)\)", line):
            count = math.prod(int(size) for size in load[2].split("x") if size)
            found[tuple(resolved(places.get(load[4], ""))[:2])] = bases.get(load[1], "?"), load[3], count
        elif defined := re.match(r"\s+(%\w+)(?::\d+)? = (?:tt|arith|scf)\.\w+(.*)", line):
            for name, start in re.findall(r"(%\w+) = (%[\w#]+)", defined[2]):  # loop-carried values
                if start in bases:
                    bases[name] = bases[start]
            if "!tt.ptr" in line:
                operands = [bases[x] for x in re.findall(r"%[\w#]+", defined[2]) if x in bases]
                bases[defined[1]] = operands[0] if operands else "?"
    return found
