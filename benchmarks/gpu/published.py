"""Compares published kernel times with the model's predictions under the same assumptions.

    python -m benchmarks.gpu.published

The machine code of these kernels is not available: tiles, warps and resident programs are taken from their papers and
sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.gpu.launches import library_product
from benchmarks.gpu.model import WARP, Estimate, Work, estimate, resident_programs
from benchmarks.gpu.rates import RATES
from quire.planner.devices import DEVICES

FA2 = "FlashAttention-2, arXiv:2307.08691"
FA3 = "FlashAttention-3, arXiv:2407.08608, figure 5"


@dataclass(frozen=True)
class Published:
    """A kernel's measured speed. amount: operations or bytes, as counted in the publication. speed: the published
    amount per second. overhead: seconds that the measurement adds to a launch. others: further launches, and how often
    each occurs.
    """

    name: str
    card: str
    work: Work
    amount: float
    speed: float
    source: str
    overhead: float = 0.0
    others: tuple[tuple[Work, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.amount / self.speed

    def predicted(self) -> Estimate:
        rates = RATES[self.card]
        found = estimate(self.work, rates)
        return replace(found, seconds=found.seconds + sum(estimate(w, rates).seconds * n for w, n in self.others))

    def error(self) -> float:
        """Return the predicted time divided by the published time, minus one."""
        return (self.predicted().seconds + self.overhead) / self.seconds - 1


def attention(
    name: str,
    card: str,
    batch: int,
    heads: int,
    length: int,
    dim: int,
    causal: bool,
    rows: int,
    keys: int,
    warps: int,
    groups: int = 0,
    stages: int = 1,
    registers: int = 255,
    is_persistent: bool = False,
) -> Work:
    """Return the work of attention over prompts. rows, keys: the tile's sizes. warps: the number of computing warps.
    groups: independent warp groups of a program, for wgmma and tcgen05 (0: mma.sync, each warp is independent). stages:
    tiles of keys in flight."""
    tiles = math.ceil(length / rows)
    steps = (
        sum(math.ceil(min(length, (tile + 1) * rows) / keys) if causal else length / keys for tile in range(tiles))
        / tiles
    )
    scores = rows * keys
    values = rows * dim
    lanes = {
        "fma": steps * (2 * scores + values),  # scaling and maximum's difference, sum, rescaled values
        "alu": steps * 1.5 * scores,  # maximum; conversion of two at a time
        "special": steps * scores,
    }
    instructions = sum(lanes.values()) / WARP
    shared_tile = keys * dim * 2 * 2  # bytes of a tile of keys and of values
    shared = 0.0
    if not groups:
        shared = steps * shared_tile * warps  # each warp loads all keys and values for its rows
        instructions += steps * (4 * scores * dim / 4096 + shared_tile * warps / 512)
    memory = rows * dim * 2 + stages * shared_tile
    resident = resident_programs(RATES[card], warps, registers, memory)
    return Work(
        name,
        batch * heads * tiles,
        resident,
        longest=2.0 if causal else 1.0,
        moved=(rows * dim * 2 * 2 + length * dim * 4 / tiles),
        cached=steps * shared_tile,
        in_flight=stages * shared_tile,
        products=4.0 * steps * scores * dim,
        synchronous=not groups,
        lanes=lanes,
        instructions=instructions,
        shared=shared,
        streams=groups or warps / 4,
        is_persistent=is_persistent,
    )


def product(name: str, card: str, m: int, n: int, k: int, tiles: tuple[tuple[int, int], ...]) -> Work:
    """Return the work of a matrix product with the best of some tiles, as a library would choose."""

    def work(tile: tuple[int, int]) -> Work:
        rows, columns = tile
        programs = math.ceil(m / rows) * math.ceil(n / columns)
        step = (rows + columns) * 64 * 2
        is_synchronous = RATES[card].card.capability == 80
        sharers = 1 if is_synchronous else 2  # two programs of a cluster load one of the operands together
        return Work(
            name,
            programs,
            1,
            moved=(m + n) * k * 2 / programs + rows * columns * 2,
            cached=(rows + columns / sharers) * k * 2,
            in_flight=3 * step,
            products=2.0 * rows * columns * k,
            synchronous=is_synchronous,
        )

    return min((work(tile) for tile in tiles), key=lambda work: estimate(work, RATES[card]).seconds)


def _attention_flops(batch: int, heads: int, length: int, dim: int, causal: bool) -> float:
    return 4.0 * batch * heads * length**2 * dim / (2 if causal else 1)


FA2_TILES = {64: (128, 128, 4), 128: (128, 64, 4), 256: (128, 64, 8)}  # rows, keys, warps: csrc of flash-attention 2
FA3_TILES = {64: (128, 128), 128: (128, 128), 256: (128, 80)}  # two warpgroups that compute: hopper/ of flash-attention
FA3_SPEEDS = {  # dim, causal: sequence length -> TFLOP/s of FlashAttention-2 and -3 on H100; heads * dim = 2048
    (64, False): {2048: (318, 460), 16384: (324, 497)},
    (64, True): {2048: (262, 371), 16384: (299, 473)},
    (128, False): {2048: (362, 625), 16384: (370, 648)},
    (128, True): {2048: (298, 521), 16384: (335, 616)},
    (256, False): {2048: (321, 707), 16384: (326, 756)},
    (256, True): {2048: (278, 537), 16384: (298, 642)},
}
EVENTS = 5e-6  # added by events around one launch: 256 cubed takes 8.2 µs in the same table, and 3 µs in the model
MATMUL_TILES = ((128, 256), (256, 128), (128, 128), (128, 192), (192, 128), (64, 256))


# Products of libraries on H100: bytes of an input, outputs, inputs, source, and TFLOP/s by the number of rows. Those of
# vLLM's pulls repeat a CUDA graph, so weights that fit into the second-level cache stay there. These are left out.
_GEMMA = "vLLM pull 49363"
_LIBRARY = (
    (2, 6144, 4096, "vLLM pull 17126 (card: by speed)", {1: 2.51, 16: 39.1, 64: 160.6, 128: 307.9, 256: 544.3}),
    (2, 12_288, 5376, _GEMMA, {1: 2.87, 16: 46.5, 64: 182.6, 128: 352.6}),
    (2, 43_008, 5376, _GEMMA, {1: 3.07, 16: 48.3, 64: 188.0, 128: 364.7, 256: 593.3}),
    (2, 2112, 7168, "vLLM pull 23280", {256: 401.9, 512: 566.3, 1024: 619.8, 2048: 648.2, 4096: 715.8}),
    (1, 12_288, 5376, _GEMMA, {1: 5.16, 16: 83.1, 64: 318.4, 128: 581.8}),
    (1, 43_008, 5376, _GEMMA, {1: 6.08, 16: 94.0, 64: 356.7, 128: 647.3}),
)  # fmt: skip
_DEEPGEMM = (  # rows, outputs, inputs, µs; H800, whose processors and memory are those of an H100
    (64, 7168, 16_384, 44.7),
    (128, 7168, 16_384, 46.6),
    (128, 4096, 7168, 14.1),
    (4096, 2112, 7168, 117.2),
    (4096, 24_576, 1536, 312.4),
    (4096, 4096, 7168, 184.4),
    (4096, 7168, 16_384, 708.4),
)


def _library(name: str, sizes: tuple[int, int, int], size: int, seconds: float, source: str) -> Published:
    """Return a product of a library. sizes: rows, outputs, inputs. size: bytes of an input."""
    rows, outputs, inputs = sizes
    work, *others = library_product(RATES["H100"], rows, outputs, inputs, size)
    flops = 2.0 * rows * outputs * inputs
    shape = f"{rows} x {outputs} x {inputs}"
    return Published(
        f"{name}, {shape}", "H100", work, flops, flops / seconds, source, others=tuple((w, 1.0) for w in others)
    )


def _products() -> list[Published]:
    found = []
    for size, outputs, inputs, source, speeds in _LIBRARY:
        for rows, speed in speeds.items():
            seconds = 2.0 * rows * outputs * inputs / speed / 1e12
            name = "cuBLAS, bf16" if size == 2 else "CUTLASS, fp8"
            found.append(_library(name, (rows, outputs, inputs), size, seconds, source))
    for rows, outputs, inputs, duration in _DEEPGEMM:
        source = "DeepGEMM, README of the first version"
        found.append(_library("DeepGEMM, fp8", (rows, outputs, inputs), 1, duration * 1e-6, source))
    return found


def _kernels() -> list[Published]:
    found = _products()
    for (dim, causal), speeds in FA3_SPEEDS.items():
        for length, (second, third) in speeds.items():
            batch = 16384 // length
            heads = 2048 // dim
            flops = _attention_flops(batch, heads, length, dim, causal)
            shape = f"head {dim}, {batch} x {length}{', causal' if causal else ''}"
            sizes = ("H100", batch, heads, length, dim, causal)
            found.append(
                Published(
                    f"FlashAttention-2, {shape}",
                    "H100",
                    attention("fa2", *sizes, *FA2_TILES[dim]),
                    flops,
                    second * 1e12,
                    FA3,
                )
            )
            found.append(
                Published(
                    f"FlashAttention-3, {shape}",
                    "H100",
                    attention("fa3", *sizes, *FA3_TILES[dim], 8, 2, 2),
                    flops,
                    third * 1e12,
                    FA3,
                )
            )
    flops = _attention_flops(1, 16, 16384, 128, False)
    found.append(
        Published(
            "FlashAttention-2, head 128, 1 x 16384",
            "A100",
            attention("fa2", "A100", 1, 16, 16384, 128, False, *FA2_TILES[128]),
            flops,
            230e12,
            f"{FA2}: up to 230 TFLOP/s",
        )
    )
    for length, seconds in ((4096, 2.779694e-3), (16384, 41.799503e-3)):
        flops = _attention_flops(4, 32, length, 128, True)
        found.append(
            Published(
                f"FlashAttention-2, head 128, 4 x {length}, causal",
                "A100",
                attention("fa2", "A100", 4, 32, length, 128, True, *FA2_TILES[128]),
                flops,
                flops / seconds,
                "flash-attention issue 307 (card taken from its speed)",
            )
        )
    for length, speed in ((2048, 427.77), (16384, 486.99)):
        flops = _attention_flops(4, 32, length, 128, False)
        found.append(
            Published(
                f"Triton's fused attention, head 128, 4 x {length}",
                "H100",
                attention("triton", "H100", 4, 32, length, 128, False, 128, 128, 8, 1, 2),
                flops,
                speed * 1e12,
                "facebookexperimental/triton pull 206",
            )
        )
    for length, speed in ((4096, 566.918), (16384, 746.301)):
        flops = _attention_flops(4, 48, length, 128, False)
        found.append(
            Published(
                f"Triton's fused attention, head 128, 4 x {length}",
                "B200",
                attention("triton", "B200", 4, 48, length, 128, False, 128, 128, 8, 1, 2),
                flops,
                speed * 1e12,
                "meta-pytorch/tritonbench pull 1014",
            )
        )
    for n, speed in ((2048, 511.3), (2560, 533.4), (2816, 616.5), (3072, 584.7)):
        found.append(
            Published(
                f"cuBLAS, {n} cubed",
                "H100",
                product("cublas", "H100", n, n, n, MATMUL_TILES),
                2.0 * n**3,
                speed * 1e12,
                "triton issue 3672",
                EVENTS,
            )
        )
    size = 128 * 4096 * 576 * 2.0  # latents of DeepSeek-V3: 128 requests of 4096 tokens
    latents = Work(
        "flash_mla",
        132,
        1,
        moved=size / 132,
        cached=size / 132,
        in_flight=2 * 64 * 576 * 2,
        products=size / 132 * 2 * 16,
        synchronous=False,
    )
    found.append(
        Published(
            "FlashMLA, 128 x 4096, memory-bound",
            "H100",
            latents,
            size,
            3000e9,
            "FlashMLA, README: up to 3000 GB/s on H800",
        )
    )
    layer = ((12_288, 4096), (4096, 4096), (22_016, 4096), (4096, 11_008))  # Llama-2-7B: outputs, inputs
    rates = RATES["A100"]
    others = [(work, 32.0) for shape in layer for work in library_product(rates, 1, *shape)]
    others.append((Work("norms, rotation, attention, activation", 32, 1), 32 * 5.0))
    (head,) = library_product(rates, 1, 32_000, 4096)[:1]
    found.append(
        Published("gpt-fast, a token of Llama-2-7B", "A100", head, 1.0, 104.9, "gpt-fast, README", others=tuple(others))
    )
    return found


KERNELS = _kernels()


# ---- sums over ranks through torch's symmetric memory


@dataclass(frozen=True)
class Sum:
    """A measured all-reduce. kind: two-shot, or multimem (NVLink SHARP). size: bytes of the tensor."""

    kind: str
    ranks: int
    size: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.size / 2**20:g} MiB"

    @property
    def predicted(self) -> float:
        """Return the bytes that cross a rank's links, divided by their speed, and the latency of the exchanges. The
        latencies and the shares of NVLink 4 fit vLLM's pull 42324 (8 ranks of compute capability 9.0, 0.5 to 128 MiB).
        """
        share = 1 / self.ranks
        copies, link_share, latency = {
            "two-shot": (2 * (1 - share), 0.57, 11.4e-6),
            "multimem": (1 + share, 0.53, 8.5e-6),
        }[self.kind]
        return latency + copies * self.size / (link_share * DEVICES["H100"].link)

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1


SUMS = (  # vLLM pull 24111
    Sum("two-shot", 6, 2**19, 17e-6),
    Sum("two-shot", 6, 2**22, 41e-6),
    Sum("multimem", 6, 2**19, 13e-6),
    Sum("multimem", 6, 2**22, 31e-6),
)


def main() -> None:
    print(f"{'kernel':62} {'card':5} {'published':>11} {'predicted':>11} {'error':>7}  bound")
    for kernel in KERNELS:
        found = kernel.predicted()
        predicted = found.seconds + kernel.overhead
        print(
            f"{kernel.name:62} {kernel.card:5} {kernel.seconds * 1e6:8.1f} µs {predicted * 1e6:8.1f} µs "
            f"{kernel.error():+6.0%}  {found.bound}"
        )
    errors = [abs(kernel.error()) for kernel in KERNELS]
    for found in SUMS:
        print(f"{found.name:68} {found.seconds * 1e6:8.1f} µs {found.predicted * 1e6:8.1f} µs {found.error:+6.0%}")
    print(
        f"{sum(error <= 0.15 for error in errors)} of {len(errors)} within 15 %; mean {sum(errors) / len(errors):.0%}"
    )


if __name__ == "__main__":
    main()
