"""The work of a launch that was traced on the simulated device (tracing.py), for the time model.

Triton's kernels: the machine code shows which instructions a program executes, and how many programs fit on a
processor. Torch operations run library kernels without available machine code: matrix products are assumed to be good
(the best of some tiles and splits), and all other kernels to only move bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from benchmarks.gpu.attention_work import Item, plan_items
from benchmarks.gpu.machine_code import Loop, MachineCode, read
from benchmarks.gpu.model import WARP, Work, estimate, resident_programs
from benchmarks.gpu.rates import PRODUCT_SHARE, Rates
from benchmarks.gpu.tracing import Launch

CHUNK = 4096  # bytes that a program of a simple kernel of torch moves
STAGE = 64  # inputs of a product that a stage of its pipeline holds
TILES = ((128, 256), (256, 128), (128, 192), (128, 128), (64, 256), (64, 128), (64, 64), (16, 128), (16, 64), (16, 32))

_FMA = re.compile(r"^(FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2|IMAD|FFMA2|FADD2|FMUL2)\b")
_SPECIAL = re.compile(r"^(MUFU|I2F|F2I|F2F|POPC|FCHK|BREV|FLO)\b")
_MEMORY = re.compile(r"^(LDG|STG|LDS|STS|LDSM|LDGSTS|STSM|SHFL|ATOM|ATOMS|ATOMG|RED|LDL|STL|LDC)\b")
_SHARED = re.compile(r"^(LDS|STS|LDSM|STSM|LDGSTS)\b")
_ISSUE = re.compile(
    r"^(U[A-Z]|R2UR|S2R|S2UR|BRA|BAR|SYNCS|NOP|DEPBAR|LDGDEPBAR|WARP|BSYNC|BSSY|EXIT|CS2R|ELECT|FENCE|"
    r"MEMBAR|ERRBAR|CCTL|[HIQOD]MMA|[HIQ]GMMA)"
)
_FREE = re.compile(
    r"^aten\.(detach|view|_unsafe_view|slice|alias|reshape|empty|new_empty|empty_like|empty_strided|"
    r"select|unsqueeze|squeeze|t|transpose|permute|expand|as_strided|split|split_with_sizes|unbind|"
    r"lift_fresh|narrow|item|_local_scalar_dense|record_stream|set_|resize_|chunk|unfold|flatten|"
    r"_reshape_alias|is_pinned|_pin_memory|movedim)\b"
)
_PRODUCTS = {f"aten.{name}.default" for name in ("linear", "mm", "addmm", "matmul", "bmm", "_scaled_mm")}
_WHOLE = ("dense", "float8", "integer")  # forms of weights whose elements are whole bytes


@dataclass(frozen=True)
class Step:
    """Information that a launch does not contain: each request's tokens in the step, its length after the step, and the
    launches that planned the attention, by the plan that they wrote (see `plans_of`)."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    plans: Mapping[int, Launch] = field(default_factory=dict)


def plans_of(launches: Iterable[Launch]) -> dict[int, Launch]:
    """Return the launches of plan_kernel."""
    return {id(launch.arguments["plan"]): launch for launch in launches if launch.name == "plan_kernel"}


def works(launch: Launch, rates: Rates, step: Step) -> list[Work]:
    """Return the kernels that a launch runs: none for an operation that only creates a view."""
    if launch.kernel is not None:
        is_overlapped = bool(getattr(launch.kernel.metadata, "launch_pdl", False))
        return [replace(_of_triton(launch, rates, step), is_overlapped=is_overlapped)]
    if is_free(launch):
        return []
    if launch.name in _PRODUCTS:
        x = next(a for a in launch.arguments["args"] if isinstance(a, Tensor) and a.dim() > 1)
        outputs = launch.result.shape[-1]
        return library_product(rates, launch.result.numel() // outputs, outputs, x.shape[-1], x.element_size())
    tensors = [*_tensors(launch.arguments["args"]), *_tensors(launch.result)]
    if launch.name.startswith(("aten.index", "aten.scatter", "aten.embedding", "aten.gather", "aten.copy_")):
        tensors = sorted(tensors, key=lambda x: x.numel())[:-1] or tensors  # only part of the largest
    moved = float(sum(x.numel() * x.element_size() for x in tensors))
    programs = max(1, math.ceil(moved / CHUNK))
    return [_placed(Work(launch.name.split(".")[1], programs, 8), moved, rates)]


def _of_triton(launch: Launch, rates: Rates, step: Step) -> Work:
    if "attend" in launch.name:
        return _attention(launch, rates, step)
    if launch.name == "merge_kernel":
        return _merging(launch, rates, step)
    if launch.name == "_product" and launch.arguments["FORM"] in _WHOLE and not launch.arguments["EXPERTS"]:
        return _own_product(launch, rates)
    return _simple(launch, rates)


def is_free(launch: Launch) -> bool:
    """Whether nothing runs on the device: a view, or an allocation of a result."""
    return launch.kernel is None and _FREE.match(launch.name) is not None


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [x for value in values for x in _tensors(value)] if isinstance(values, (list, tuple)) else []


def _placed(work: Work, moved: float, rates: Rates) -> Work:
    """Tensors that fit into half of the second-level cache are still there from the previous launch."""
    each = moved / work.programs
    return replace(work, cached=each, moved=0.0 if moved < rates.l2_size / 2 else each)


# ---- products of libraries


def library_product(rates: Rates, rows: int, outputs: int, inputs: int, size: int = 2) -> list[Work]:
    """Return a product with the best of some tiles and splits over the inputs. Splits are summed afterwards. size:
    bytes of an input; tensor cores multiply twice as many inputs of one byte as of two."""
    best: list[Work] = []
    shortest = math.inf
    for tile_rows, tile_outputs in TILES:
        if tile_rows > 16 and tile_rows >= 2 * max(rows, 33):  # a tile of 64 rows suits 17 rows and more
            continue
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits > 1 and inputs / splits < 4 * STAGE:
                break
            candidate = _product(rates, rows, outputs, inputs, tile_rows, tile_outputs, splits, size)
            seconds = sum(estimate(work, rates).seconds for work in candidate)
            if seconds < shortest:
                best = candidate
                shortest = seconds
    return best


def _product(
    rates: Rates, rows: int, outputs: int, inputs: int, tile_rows: int, tile_outputs: int, splits: int, size: int
) -> list[Work]:
    programs = math.ceil(rows / tile_rows) * math.ceil(outputs / tile_outputs) * splits
    stage = (tile_rows + tile_outputs) * STAGE * 2  # bytes, of more inputs if they are smaller
    stages = 4
    warps = 8 if tile_rows * tile_outputs >= 128 * 192 else 4
    registers = min(255, 64 + tile_rows * tile_outputs // (warps * WARP))
    resident = resident_programs(rates, warps, registers, stages * stage)
    part = inputs / splits
    result = tile_rows * tile_outputs * (2 if splits == 1 else 4)
    synchronous = rates.card.capability in (80, 120) or tile_rows < 64
    sharers = 1 if synchronous else 2  # programs of a cluster load one operand together
    moved = (rows * (inputs if rows * inputs * size > rates.l2_size / 2 else 0) + outputs * inputs) * size
    lanes = {"alu": part * tile_rows * tile_outputs / 512} if synchronous else {}
    work = Work(
        f"{'cublas' if size == 2 else 'scaled_mm'} {rows} x {inputs} x {outputs}",
        programs,
        resident,
        moved=moved / programs,
        cached=(tile_rows + tile_outputs / sharers) * part * size + result,
        in_flight=(stages - 1) * stage,
        products=2.0 * tile_rows * tile_outputs * part,
        is_eight=size == 1,
        synchronous=synchronous,
        lanes=lanes,
        memory_share=PRODUCT_SHARE,
    )
    if splits == 1:
        return [work]
    added = rows * outputs * (4 * splits + 2)
    return [work, _placed(Work("cublas splitK sum", math.ceil(added / CHUNK), 8), added, rates)]


# ---- kernels of Triton


def lanes(instructions: Counter[str], warps: int) -> tuple[dict[str, float], float, float]:
    """Return operations by pipe, warp instructions, and bytes of shared memory, if each warp executes
    `instructions`."""
    found: dict[str, float] = {}
    shared = 0.0
    for name, count in instructions.items():
        if _SHARED.match(name):
            shared += count * warps * WARP * _bytes(name)
        if _FMA.match(name):
            pipe = "fma"
        elif _SPECIAL.match(name):
            pipe = "special"
        elif _MEMORY.match(name):
            pipe = "memory"
        elif _ISSUE.match(name):
            continue
        else:
            pipe = "alu"
        wide = 2 if name.startswith(("FFMA2", "FADD2", "FMUL2")) else 1  # two results per lane
        found[pipe] = found.get(pipe, 0.0) + count * warps * WARP * wide
    return found, float(instructions.total() * warps), shared


def _bytes(name: str) -> int:
    """Return the bytes of shared memory per thread."""
    if name.startswith(("LDSM", "STSM")):
        return 4 * int(name[-1]) if name[-1] in "124" else 4
    return next((size for part, size in ((".128", 16), (".64", 8), (".U16", 2), (".U8", 1)) if part in name), 4)


def _combined(parts: list[tuple[Counter[str], float]], warps: int) -> dict[str, Any]:
    """Return the fields of Work for instructions that a warp executes the given number of times each."""
    total: dict[str, float] = {}
    issued = shared = 0.0
    for instructions, times in parts:
        found, count, moved = lanes(instructions, warps)
        issued = issued + count * times
        shared = shared + moved * times
        for pipe, number in found.items():
            total[pipe] = total.get(pipe, 0.0) + number * times
    return {"lanes": total, "instructions": issued, "shared": shared}


def _outside(code: MachineCode) -> Counter[str]:
    """Return the instructions outside loops."""
    rest = Counter(code.instructions)
    for loop in code.loops:
        rest.subtract(loop.instructions)
    return +rest


def _simple(launch: Launch, rates: Rates) -> Work:
    """Return the work of a kernel whose time depends on its bytes, or on its straight-line code if it is small."""
    code = read(launch.kernel)
    programs = math.prod(launch.grid)
    tensors = {name: x for name, x in launch.arguments.items() if isinstance(x, Tensor) and name not in _TABLES}
    seen: dict[tuple[int, ...], int] = {}
    for x in tensors.values():  # a tensor may be passed twice, as a placeholder
        seen[id(x), x.numel()] = x.numel() * x.element_size()
    moved = float(sum(seen.values()))
    moved += sum(x.numel() * x.element_size() for name, x in tensors.items() if name in _IN_PLACE.get(launch.name, ()))
    loads = [loop for loop in code.loops if loop.bytes_loaded]
    each = moved / programs
    parts = [(_outside(code), 1.0)]
    in_flight = math.inf
    if loads:
        bytes_loaded = sum(loop.bytes_loaded for loop in loads) * code.warps
        times = max(1.0, each / bytes_loaded)
        parts += [(loop.instructions, times) for loop in loads]
        in_flight = float(bytes_loaded)
    work = Work(
        launch.name,
        programs,
        max(1, code.programs(rates.card)),
        streams=code.warps / 4,
        in_flight=in_flight,
        is_prefetched=False,
        **_combined(parts, code.warps),
    )
    path = sum(instructions.total() * times for instructions, times in parts)
    return _placed(replace(work, path=path), moved, rates)


def _own_product(launch: Launch, rates: Rates) -> Work:
    """Return the work of a product with weights of whole bytes (quire/ops/triton/linear.py). Tiles of rows that follow
    each other read the same weights."""
    code = read(launch.kernel)
    named = launch.arguments
    rows = named["rows"]
    outs = named["OUTS"]
    steps = math.ceil(named["span"] / named["INS"])
    programs = math.prod(launch.grid)
    size = named["codes"].element_size()
    row_size = named["x"].element_size()
    stage = outs * named["INS"] * size  # bytes of weights
    buffers = code.shared // (stage + named["ROWS"] * named["INS"] * row_size)
    loop = _main_loop(code)
    parts = [(_outside(code), 1.0), (loop.instructions, float(steps))]
    synchronous = not code.products() & {"wgmma", "tcgen05"}
    weights = stage * steps
    tile_rows = min(rows, named["ROWS"])
    x = tile_rows * named["INS"] * steps * row_size
    result = tile_rows * outs * named["out"].element_size()
    return Work(
        f"_product {rows} x {named['ins']} x {named['outs']}",
        programs,
        max(1, code.programs(rates.card)),
        moved=float(weights) / named["tiles"],
        cached=float(weights + x + result),
        in_flight=float((stage + tile_rows * named["INS"] * row_size) * max(1, buffers - 1)),
        products=2.0 * named["ROWS"] * outs * named["INS"] * steps,
        is_eight=row_size == 1,
        synchronous=synchronous,
        path=sum(instructions.total() * times for instructions, times in parts),
        **_combined(parts, code.warps),
    )


_TABLES = {"cache", "block_table", "block_tables", "token_ids"}  # kernels touch only some of their rows
_IN_PLACE = {"prepare_kernel": ("q", "k"), "_add_rms_norm": ("residual",)}


def _attention(launch: Launch, rates: Rates, step: Step) -> Work:
    """Return the work of a step's attention, computed from the lengths of its requests."""
    code = read(launch.kernel)
    named = launch.arguments
    rows = named["ROWS"]
    tokens = named["TOKENS"]
    keys = named["KEYS"]
    heads = named["q"].shape[1] // named["GROUP"]  # of keys and values
    parts = launch.grid[1] // heads
    inner = named["MAIN"] + named["REST"]
    columns = 1 << (named["OUT_DIM"] - 1).bit_length()
    cell = named["cache"].element_size()
    tile_bytes = keys * cell * (named["DIM"] if named["LATENT"] else named["DIM"] + named["OUT_DIM"])
    items = _items(launch, step)
    programs = len(items) * heads * parts
    average = sum(item.end - item.begin for item in items) / len(items)
    longest = max(item.end - item.begin for item in items)
    divided = sum(item.is_divided for item in items)
    partial = divided * tokens * named["heads"] * named["OUT_DIM"] * 4  # bytes that merge_kernel reads
    loop = _main_loop(code)
    ways = _combined([(_outside(code), 1.0), (loop.instructions, average)], code.warps)
    is_synchronous = not code.products() & {"wgmma", "tcgen05"}
    is_prefetched = any(name.startswith(("LDGSTS", "UTMALDG", "UBLKCP")) for name in loop.instructions)
    buffers = max(1, code.shared // tile_bytes) if is_prefetched else 1
    in_flight = tile_bytes * max(1, buffers - 1) if is_prefetched else tile_bytes
    once = sum(step.lengths) * heads * tile_bytes / keys
    queries = 2 * sum(step.counts) * heads * named["GROUP"] * named["DIM"] * 2
    return Work(
        launch.name,
        programs,
        max(1, code.programs(rates.card)),
        longest=max(1.0, longest / average),
        moved=(once + queries) / programs,
        cached=average * tile_bytes + partial / programs,
        in_flight=in_flight,
        products=average * 2.0 * rows * keys * (inner + columns),
        synchronous=is_synchronous,
        streams=code.warps / 4 if is_synchronous else 1,
        is_prefetched=is_prefetched,
        **ways,
    )


def _items(launch: Launch, step: Step) -> list[Item]:
    """Return the work items of a launch that reads a plan."""
    how = step.plans[id(launch.arguments["plan"])].arguments
    return plan_items(step.counts, step.lengths, *(how[name] for name in ("tokens", "keys", "parts", "fewest", "most")))


def _merging(launch: Launch, rates: Rates, step: Step) -> Work:
    """Return the work of adding up partial results, which were just written and are in the second-level cache."""
    code = read(launch.kernel)
    named = launch.arguments
    divided = [item for item in _items(launch, step) if item.is_divided]
    tiles = {(item.request, item.first) for item in divided}
    rows = sum(min(named["tokens"], step.counts[request] - first) for request, first in tiles)
    programs = math.prod(launch.grid)
    turns = math.ceil(rows / launch.grid[0])  # rows of the program with the most
    parts = len(divided) / max(1, len(tiles))
    inner = max(code.loops, key=lambda loop: loop.bytes_loaded * loop.is_innermost)
    share = rows / launch.grid[0]  # of an average program

    def instructions(turns: float) -> list[tuple[Counter[str], float]]:
        repeats = {id(inner): turns * math.ceil(parts / named["PART"])}
        loops = [(loop.instructions, repeats.get(id(loop), turns)) for loop in code.loops]
        return [(_outside(code), 1.0), *loops]

    partial = parts * (named["DIM"] + 2) * 4
    return Work(
        launch.name,
        programs,
        max(1, code.programs(rates.card)),
        cached=share * (partial + named["DIM"] * 2),
        in_flight=float(named["PART"] * named["DIM"] * 4),
        is_prefetched=False,
        streams=code.warps / 4,
        path=sum(executed.total() * times for executed, times in instructions(turns)),
        **_combined(instructions(share), code.warps),
    )


def _main_loop(code: MachineCode) -> Loop:
    """Return the loop over keys that all rows attend to. This is the loop with products that has the fewest
    instructions."""
    loops = [loop for loop in code.loops if loop.share_of_products()]
    if not loops:
        loops = list(code.hot()) or list(code.loops)
    return min(loops, key=lambda loop: loop.instructions.total())
