"""The rates of each card that the time model (model.py) assumes, with their sources.

Units are bytes, seconds, hertz and operations. A multiply-add counts as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.planner.devices import DEVICES, KINDS
from quire.platform.gpu.cards import CARDS, Card

KIB = 2**10
MIB = 2**20
GIB = 2**30
TERA = 1e12


@dataclass(frozen=True)
class Rates:
    """The rates of a card.

    bandwidth: of its memory, as on the data sheet. tensor: dense products of 16-bit inputs per second, as on the data
    sheet, at `clock`. sustained: the share of `tensor` that the largest products reach under the power limit;
    sustained_eight: of twice that rate, with inputs of 8 bits. synchronous: the share of `tensor` that mma.sync can
    issue; wgmma and tcgen05 can issue all of it. fma, alu, special: a processor's lanes for multiplications and
    additions, for comparisons and integers, and for exponentials.
    """

    card: Card
    bandwidth: float
    tensor: float
    clock: float
    l2_size: int
    sustained: float
    sustained_eight: float
    synchronous: float
    fma: int
    alu: int = 64
    special: int = 16

    def products(self, is_eight: bool) -> float:
        """Return the operations of tensor cores per second on the data sheet."""
        return self.tensor * (2 if is_eight else 1)

    @property
    def memory_bandwidth(self) -> float:
        """Return the bytes per second that a simple kernel is expected to reach on a large tensor ("measured
        bandwidth")."""
        return self.bandwidth * MEMORY_SHARE

    @property
    def l2_bandwidth(self) -> float:
        halves = 2 if self.card.capability == 100 else 1  # a B200 has two dies
        return halves * L2_BYTES_PER_CLOCK * self.clock * L2_SHARE


# Shares and latencies that apply to all cards.
_GPU = KINDS["gpu"]
MEMORY_SHARE = _GPU.memory_share  # of the data sheet's bandwidth
PRODUCT_SHARE = 0.92  # of that, reached by a library's product
L2_BYTES_PER_CLOCK = 5120
L2_SHARE = 0.7
SHARED_BYTES_PER_CLOCK = 128  # of a processor
ISSUED_PER_CLOCK = 4  # instructions of a processor: one for each of its four schedulers
LOAD_STORE_LANES = 32
CLOCKS_PER_INSTRUCTION = 3  # between two instructions of a warp, with one warp per scheduler
LAUNCH = 0.45e-6  # between the end of a kernel's work and the start of the next one's, inside a replayed graph
MEMORY_LATENCY = 0.6e-6  # from a load to its data when memory is busy
HOST_OPERATION = _GPU.launch  # host time of an operation of torch that launches a kernel
HOST_TRITON = 8.7e-6  # host time of the launch of a Triton kernel
HOST_VIEW = 1e-6  # host time of a view, or of memory for a result
HOST_STEP = _GPU.step  # other host time of a step: scheduling, results
HOST_REQUEST = _GPU.request  # the same for each request of a step
HOST_GRAPH = _GPU.graph  # host time to replay a graph
HOST_IMPORT = 4.0  # seconds until Python, torch and the context of the GPU are ready
CACHED_KERNEL = 0.01  # seconds to load a kernel from Triton's cache
COMPILED_KERNEL = 1.5  # seconds to compile one
STORE = 0.25e-6  # from the last result of a program to the end of the program


def _rates(name: str, card: Card, *others: float) -> Rates:
    """Return the rates of a card of quire/planner/devices.toml. others: fields that are missing there."""
    device = DEVICES[name]
    clock, l2_size, synchronous, fma, *sustained = others
    return Rates(
        card,
        device.bandwidth,
        device.rates["bf16"],
        clock,
        int(l2_size),
        device.kind.product_share,
        sustained[0] if sustained else device.kind.product_share,
        synchronous,
        int(fma),
    )


RATES = {
    "A100": _rates("A100", CARDS["sm_80"], 1.41e9, 40 * MIB, 1.0, 64),
    "H100": _rates("H100", CARDS["sm_90"], 1.83e9, 50 * MIB, 0.63, 128, 0.709),
    "H200": _rates(
        "H200", replace(CARDS["sm_90"], name="NVIDIA H200", memory=141 * GIB), 1.83e9, 50 * MIB, 0.63, 128, 0.709
    ),
    "B200": _rates("B200", CARDS["sm_100"], 1.85e9, 126 * MIB, 0.25, 128),
    "RTX PRO 6000": _rates("RTX-PRO-6000", CARDS["sm_120"], 2.617e9, 128 * MIB, 1.0, 128),
}

ASSUMPTIONS = (  # assumption, value, source; the first run on a card confirms or refutes each
    (
        "bandwidth, processors, second-level cache, dense 16-bit products and their clock",
        "RATES",
        "data sheets of the cards; white papers of Ampere, Hopper and RTX Blackwell. B200: DGX B200's data sheet / 8",
    ),
    (
        "share of the bandwidth that a simple kernel reaches",
        f"{MEMORY_SHARE:.0%}",
        "a published measurement with an H100 NVL: 90.6 % for a copy, 91.4 % for two reads and a write; for all cards",
    ),
    (
        "share of that which a library's products reach",
        f"{PRODUCT_SHARE:.0%}",
        "fits products of 1 to 128 rows on H100 (vLLM pulls 17126 and 49363, DeepGEMM): 82 % for 50 MB of weights, "
        "101 % for 462 MB",
    ),
    (
        "the same share of Quire's product with up to 16 rows, as long as enough bytes are in flight",
        "100%",
        "as attention: FlashMLA reaches 98 % of it on H800, and a Triton kernel that moves rows 91 % of the data sheet "
        "on H100 (torchrec pull 4634). Not measured for products",
    ),
    (
        "share of the processors that read weights at the full bandwidth, with 64 KB or more in flight in each",
        "45%",
        "estimate: then a processor receives 37 bytes in a clock on H200, of the 64 of its port; decides the tiles of "
        "float8 products with up to 32 rows",
    ),
    (
        "largest products under the power limit",
        "A100 267.9, H100 and H200 794.5 (8 bits: 1402.6), B200 1745 TFLOP/s",
        "Bekman, ml-engineering, Maximum Achievable Matmul FLOPS. RTX PRO 6000: estimate, 80 %",
    ),
    (
        "the clock sinks with the use of the tensor cores, linearly, down to the value above at full use",
        "model.py",
        "estimate: power grows with the operations; fits FlashAttention-2 and -3 on H100",
    ),
    (
        "mma.sync on 9.0 issues 63 % of the tensor rate; on 8.0 and 12.0 all of it",
        "0.63",
        "Luo et al., Dissecting the Hopper architecture, arXiv:2402.13499 (62.9 %). B200: estimate, 25 %",
    ),
    (
        "lanes of a processor: multiply-add 64 on 8.0 and 128 later; integers and comparisons 64; exponentials 16",
        "RATES",
        "CUDA C++ Programming Guide, table of arithmetic throughput",
    ),
    ("instructions issued by a processor in a clock", str(ISSUED_PER_CLOCK), "white papers: four schedulers"),
    (
        "clocks from an instruction of a warp to its next one, without other warps",
        str(CLOCKS_PER_INSTRUCTION),
        "estimate: 4 where each needs the result of the one before (arXiv:2402.13499), less where not",
    ),
    ("bytes of shared memory in a clock and processor", str(SHARED_BYTES_PER_CLOCK), "CUDA C++ Programming Guide"),
    (
        "second-level cache: bytes in a clock, and the share that is reached",
        f"{L2_BYTES_PER_CLOCK}, {L2_SHARE:.0%}",
        "white paper of Ampere; the share is an estimate; taken for all cards, twice as much for the two dies of a "
        "B200",
    ),
    (
        "an empty kernel inside a replayed graph",
        f"{(LAUNCH + MEMORY_LATENCY + STORE) * 1e6:.2f} µs",
        "a published measurement with an H100 NVL: 1.28 µs for a kernel that adds one to a number",
    ),
    (
        "between two kernels of a graph",
        f"{LAUNCH * 1e6:.2f} µs",
        "estimate: the 1.28 µs above less a load and the end of a program; 0 with programmatic dependent launch",
    ),
    (
        "latency of memory under load",
        f"{MEMORY_LATENCY * 1e6:.2f} µs",
        "estimate: arXiv:2402.13499 measures about 0.3 µs without load",
    ),
    (
        "host time of an operation of torch",
        f"{HOST_OPERATION * 1e6:.1f} µs",
        "a published measurement with an H100 NVL",
    ),
    (
        "host time of the launch of a Triton kernel",
        f"{HOST_TRITON * 1e6:.1f} µs",
        "vLLM pull 34838: 8.68 µs with a GB200; tritonbench pull 1002: about 11 µs",
    ),
    ("host time of a view, or of memory for a result", f"{HOST_VIEW * 1e6:.1f} µs", "estimate"),
    (
        "host time of a step besides, and for each of its requests",
        f"{HOST_STEP * 1e3:.2f} ms, {HOST_REQUEST * 1e6:.0f} µs",
        "1.7 ms for 256 requests, docs/performance.md; the division is an estimate",
    ),
    ("host time to replay a graph", f"{HOST_GRAPH * 1e6:.0f} µs", "estimate"),
    (
        "start: imports and context; a kernel from the cache; a kernel compiled",
        f"{HOST_IMPORT:.0f} s, {CACHED_KERNEL * 1e3:.0f} ms, {COMPILED_KERNEL:.1f} s",
        "estimates",
    ),
)
