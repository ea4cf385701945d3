"""The instruction sets for which the kernels can be compiled, and the features of the processor."""

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

# Instruction sets that the kernels may use: all that the processor has, or only those of an older one (for
# measurements, tests, and compilation for another machine). Each has the compiler's flags and the features that the
# processor must have, in Linux's names. The best of each kind is first.
_AVX512 = {"avx2", "fma", "bmi2", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_VNNI = {*_AVX512, "avx512_vnni", "avx512vbmi"}
_AVX512_BF16 = "-march=x86-64-v4 -mavx512vnni -mavx512vbmi -mavx512bf16"
_AMX = {"amx_tile", "amx_int8", "amx_bf16"}  # processors with it also have avx_vnni
_DOTPROD = {"asimd", "atomics", "asimddp"}
_IS_ARM = platform.machine() in ("aarch64", "arm64")
INSTRUCTION_SETS = {
    "native": ("-mcpu=native" if _IS_ARM else "-march=native", set[str]()),
    "amx": (f"{_AVX512_BF16} -mamx-tile -mamx-int8 -mamx-bf16", {*_AVX512_VNNI, "avx512_bf16", *_AMX, "avx_vnni"}),
    "avx512-bf16": (_AVX512_BF16, {*_AVX512_VNNI, "avx512_bf16"}),
    "avx512-vnni": ("-march=x86-64-v4 -mavx512vnni -mavx512vbmi", _AVX512_VNNI),
    "avx512": ("-march=x86-64-v4", _AVX512),
    "avx-vnni": ("-march=x86-64-v3 -mavxvnni", {"avx2", "fma", "bmi2", "f16c", "avx_vnni"}),
    "avx2": ("-march=x86-64-v3", {"avx2", "fma", "bmi2", "f16c"}),
    "neon-bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16", {*_DOTPROD, "i8mm", "bf16"}),
    "neon-dotprod": ("-march=armv8.2-a+dotprod", _DOTPROD),
    "neon": ("-march=armv8-a", {"asimd"}),
}
PROCESSORS = {  # by the compiler's name of a processor: the one of these instruction sets that it supports
    "haswell": "avx2", "znver1": "avx2", "znver2": "avx2", "znver3": "avx2", "alderlake": "avx-vnni",
    "skylake-avx512": "avx512", "cascadelake": "avx512", "icelake-server": "avx512-vnni", "sapphirerapids": "amx",
    "graniterapids": "amx", "znver4": "avx512-bf16", "znver5": "avx512-bf16", "cortex-a72": "neon",
    "cortex-a76": "neon-dotprod", "neoverse-n1": "neon-dotprod", "neoverse-v1": "neon-bf16",
    "neoverse-n2": "neon-bf16", "neoverse-v2": "neon-bf16", "apple-m1": "neon-dotprod", "apple-m2": "neon-bf16",
}  # fmt: skip
# Features that the kernels' sources distinguish. Libraries for two processors that agree in them are equally fast.
USED_FEATURES = {
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512vbmi", "avx512_bf16", *_AMX,
    "asimd", "asimddp", "i8mm", "bf16",
}  # fmt: skip
_ARM_FEATURES = {  # the location of each: the entry of Linux's auxiliary vector and its bit, and the name in macOS
    "asimd": (16, 1, "AdvSIMD"),
    "atomics": (16, 8, "FEAT_LSE"),
    "asimddp": (16, 20, "FEAT_DotProd"),
    "sve": (16, 22, "FEAT_SVE"),
    "i8mm": (26, 13, "FEAT_I8MM"),
    "bf16": (26, 14, "FEAT_BF16"),
}


@cache
def cpu_features() -> str:
    """Return the processor's features in Linux's names, separated by spaces, or "" if the system does not report
    them."""
    if not _IS_ARM:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            return ""
        return next((line for line in lines if line.startswith("flags")), "")
    libc: Any = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return " ".join(name for name, (*_, known_as) in _ARM_FEATURES.items() if _has(libc, known_as))
    libc.getauxval.argtypes = [ctypes.c_ulong]
    libc.getauxval.restype = ctypes.c_ulong
    entries = {entry: libc.getauxval(entry) for entry in (16, 26)}
    names = [name for name, (entry, bit, _) in _ARM_FEATURES.items() if entries[entry] >> bit & 1]
    return " ".join([*names, *(f"hwcap={bits:#x}" for bits in entries.values())])


def _has(libc: Any, feature: str) -> bool:
    value = ctypes.c_int32()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    name = f"hw.optional.arm.{feature}".encode()
    return libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value != 0
