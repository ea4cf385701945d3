"""What the engine must know about the cards it can run on: the limits of their processors.

Sources: NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the data sheets of
the cards; for AMD the CDNA3 white paper.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A kind of GPU. Sizes are bytes.

    capability: 10 * major + minor version of NVIDIA's compute capability; for AMD the name of the architecture.
    shared_memory: of one program, at most. processor_memory: shared memory of one processor, for all its programs.
    reserved_memory: shared memory of each program that the system takes for itself.
    """

    name: str
    backend: str
    capability: int | str
    processors: int
    shared_memory: int
    processor_memory: int
    memory: int
    warp_size: int = 32
    registers: int = 65_536
    warps: int = 64
    programs: int = 32
    reserved_memory: int = 1024


_KIB, _GIB = 2**10, 2**30

CARDS = {
    "sm_80": Card("NVIDIA A100", "cuda", 80, 108, 163 * _KIB, 164 * _KIB, 80 * _GIB),
    "sm_90": Card("NVIDIA H100", "cuda", 90, 132, 227 * _KIB, 228 * _KIB, 80 * _GIB),
    "sm_100": Card("NVIDIA B200", "cuda", 100, 148, 227 * _KIB, 228 * _KIB, 180 * _GIB),
    "sm_120": Card("NVIDIA RTX PRO 6000", "cuda", 120, 188, 99 * _KIB, 100 * _KIB, 96 * _GIB, warps=48, programs=24),
    "gfx942": Card("AMD MI300X", "hip", "gfx942", 304, 64 * _KIB, 64 * _KIB, 192 * _GIB, 64, warps=32,
                   reserved_memory=0),
}  # fmt: skip
