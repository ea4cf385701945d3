"""The properties of the supported GPUs: the limits of their processors.

Sources: NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the data sheets of
the cards; for AMD the CDNA3 white paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Card:
    """A kind of GPU. Sizes are bytes.

    capability: 10 * major + minor version of NVIDIA's compute capability; for AMD the name of the architecture.
    shared_memory: the most that one program can use. processor_memory: shared memory of one processor, for all its
    programs. reserved_memory: shared memory per program that the system reserves.
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

    @property
    def has_float8(self) -> bool:
        """Whether it has instructions that convert float8_e4m3fn. Triton has no such conversion for other cards."""
        return isinstance(self.capability, int) and self.capability >= 89

    def most_registers(self, warps: int, programs: int) -> dict[str, int]:
        """Return the launch option of a Triton kernel that sets the registers per thread, so that the given number of
        programs and warps run on a processor at once. Without it, ptxas may use fewer registers to run more programs,
        and spill values. Empty on AMD's cards, whose compiler has no such option."""
        most = self.registers // (self.warp_size * warps * programs) // 8 * 8
        return {"maxnreg": min(most, 255)} if self.backend == "cuda" else {}


_KIB = 2**10
_GIB = 2**30

CARDS = {
    "sm_80": Card("NVIDIA A100", "cuda", 80, 108, 163 * _KIB, 164 * _KIB, 80 * _GIB),
    "sm_86": Card("NVIDIA GeForce RTX 3090", "cuda", 86, 82, 99 * _KIB, 100 * _KIB, 24 * _GIB, warps=48, programs=16),
    "sm_89": Card("NVIDIA GeForce RTX 4090", "cuda", 89, 128, 99 * _KIB, 100 * _KIB, 24 * _GIB, warps=48, programs=24),
    "sm_90": Card("NVIDIA H100", "cuda", 90, 132, 227 * _KIB, 228 * _KIB, 80 * _GIB),
    "sm_100": Card("NVIDIA B200", "cuda", 100, 148, 227 * _KIB, 228 * _KIB, 180 * _GIB),
    "sm_120": Card("NVIDIA RTX PRO 6000", "cuda", 120, 188, 99 * _KIB, 100 * _KIB, 96 * _GIB, warps=48, programs=24),
    "sm_121": Card("NVIDIA GB10", "cuda", 121, 48, 99 * _KIB, 100 * _KIB, 128 * _GIB, warps=48, programs=24),
    "gfx942": Card(
        "AMD MI300X", "hip", "gfx942", 304, 64 * _KIB, 64 * _KIB, 192 * _GIB, 64, warps=32, reserved_memory=0
    ),
}
# The card whose kernels Triton's interpreter runs: with one processor, launches are not divided. Tests choose others.
INTERPRETED = replace(CARDS["sm_80"], processors=1)

# The limits of AMD's architectures, by the beginning of their names: bytes of LDS that a program can use, bytes of LDS
# of a processor (for RDNA a workgroup processor), threads of a wave, and waves of a processor. The longest beginning
# counts.
_AMD = {
    "gfx9": (64 * _KIB, 64 * _KIB, 64, 32),  # CDNA 1 to 3, Vega
    "gfx950": (160 * _KIB, 160 * _KIB, 64, 32),  # CDNA 4
    "gfx10": (64 * _KIB, 128 * _KIB, 32, 64),  # RDNA 1 and 2
    "gfx11": (64 * _KIB, 128 * _KIB, 32, 64),  # RDNA 3
    "gfx12": (64 * _KIB, 128 * _KIB, 32, 64),  # RDNA 4
}


@cache
def card_of(device: torch.device) -> Card:
    """Return the card of a device: the entry of CARDS for its capability, with the device's own sizes. A capability
    missing in CARDS is treated as the nearest lower one. A CPU, on which Triton's interpreter runs kernels, counts as
    INTERPRETED.
    """
    import torch

    if device.type != "cuda":
        return replace(INTERPRETED, name=str(device))
    found: Any = torch.cuda.get_device_properties(device)
    architecture = getattr(found, "gcnArchName", "").partition(":")[0]
    if architecture.startswith("gfx"):
        return _amd_card(architecture, found)
    capability = 10 * found.major + found.minor
    known = {card.capability: card for card in CARDS.values() if isinstance(card.capability, int)}
    nearest = max((number for number in known if number <= capability), default=min(known))
    return replace(
        known[nearest],
        name=found.name,
        processors=found.multi_processor_count,
        shared_memory=found.shared_memory_per_block_optin,
        processor_memory=found.shared_memory_per_multiprocessor,
        registers=found.regs_per_multiprocessor,
        memory=found.total_memory,
    )


def _amd_card(architecture: str, found: Any) -> Card:
    """Return the card of AMD's architecture with torch's properties of the device. An unknown architecture gets the
    smallest limits."""
    beginning = max((name for name in _AMD if architecture.startswith(name)), key=len, default="gfx9")
    program, processor, wave, waves = _AMD[beginning]
    return replace(
        CARDS["gfx942"],
        name=found.name,
        capability=architecture,
        processors=found.multi_processor_count,
        shared_memory=program,
        processor_memory=processor,
        warp_size=getattr(found, "warp_size", wave),
        warps=waves,
        memory=found.total_memory,
    )
