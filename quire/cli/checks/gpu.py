"""Checks of GPUs, their driver, and Triton."""

import os
import re
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.cli.checks.engine import need_engine
from quire.cli.checks.finding import Finding, memory_text, note, ok, problem
from quire.messages.errors import error_text

_LEAST_CAPABILITY = 80  # of the cards for which the kernels are checked (quire/platform/gpu/cards.py)
_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")
_WSL = Path("/dev/dxg")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_gpus() -> Iterator[Finding]:
    need_engine()
    import torch

    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    for index in range(torch.cuda.device_count()):
        try:
            yield from _gpu(index)
        except Exception as error:  # one of several may be broken
            advice = "Look at it with nvidia-smi or rocm-smi, and hide it with CUDA_VISIBLE_DEVICES meanwhile."
            yield problem(f"GPU {index} cannot be used: {error_text(error)}", advice)


def _no_gpu() -> Finding:
    import torch

    driver = _driver()
    if driver is None:
        return ok("none, so the CPU is used")
    hidden = [name for name in _HIDING if os.environ.get(name) in ("", "-1")]
    if torch.version.cuda is None and torch.version.hip is None:
        return note(
            f"there is {driver}, but PyTorch is the build for CPUs, so the CPU is used",
            "Install PyTorch's build for GPUs, which pip takes without --extra-index-url.",
        )
    if hidden:
        return note(f"{hidden[0]} hides the GPUs, so the CPU is used", f"Unset {hidden[0]} to use them.")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it finds no GPU"
    except Exception as error:
        reason = error_text(error)
    return problem(
        f"there is {driver}, but PyTorch cannot use a GPU, so the CPU is used: {reason}",
        "If the driver is too old, install a newer one or a PyTorch for an older CUDA. In a container, give it the GPU "
        "(docker run --gpus all).",
    )


def _driver() -> str | None:
    """Return the GPU driver on this machine, None if there is none."""
    try:
        version = re.search(r"Kernel Module\D*(\d[\d.]*)", _NVIDIA.read_text())
        return f"NVIDIA's driver {version[1]}" if version else "NVIDIA's driver"
    except OSError:
        pass
    if _AMD.exists():
        return "AMD's driver"
    return "a GPU of Windows" if _WSL.exists() else None


def _gpu(index: int) -> Iterator[Finding]:
    import torch

    from quire.config.engine import CacheConfig
    from quire.platform.gpu.cards import CARDS, card_of

    card = card_of(torch.device("cuda", index))
    free, total = torch.cuda.mem_get_info(index)
    properties: Any = torch.cuda.get_device_properties(index)
    is_nvidia = card.backend == "cuda"
    capability = 10 * properties.major + properties.minor
    kind = f"compute capability {properties.major}.{properties.minor}" if is_nvidia else str(card.capability)
    found = f"{index}: {card.name}, {kind}, {memory_text(free)} of {memory_text(total)} free"
    if driver := _driver():
        found += f", {driver}"
    share = CacheConfig().gpu_memory_utilization
    if is_nvidia and capability < _LEAST_CAPABILITY:
        yield problem(f"{found}; Quire's kernels need compute capability 8.0", "Use --device cpu, or another GPU.")
    elif is_nvidia and torch.version.cuda and not _is_built_for(properties.major, properties.minor):
        yield problem(f"{found}; this build of PyTorch has no code for it", "Install a PyTorch for a newer CUDA.")
    elif free < share * total:
        yield problem(
            f"{found}; the default --gpu-memory-utilization {share} needs {memory_text(share * total)}",
            "End the other programs on this GPU, or lower --gpu-memory-utilization.",
        )
    elif is_nvidia and capability not in {known.capability for known in CARDS.values()}:
        nearest = max(
            c.capability for c in CARDS.values() if isinstance(c.capability, int) and c.capability < capability
        )
        yield note(
            f"{found}; Quire does not know this kind, and treats it as compute capability {nearest / 10:.1f}",
            "Compare some answers with those of --device cpu.",
        )
    else:
        yield ok(found)


def _is_built_for(major: int, minor: int) -> bool:
    """Whether PyTorch has machine code for the GPU, or code that the driver can translate."""
    import torch

    for name in torch.cuda.get_arch_list():
        kind, _, digits = name.rstrip("af").partition("_")
        built = int(digits)
        if kind == "compute" and built <= 10 * major + minor:
            return True
        if kind == "sm" and built // 10 == major and built % 10 <= minor:
            return True
    return False


def check_triton() -> Iterator[Finding]:
    """Returns nothing on a machine without a GPU, which does not need Triton."""
    need_engine()
    import torch

    from quire.ops import HAS_TRITON, launchers

    if not torch.cuda.is_available():
        return
    if find_spec("triton") is None:
        advice = "Install the version that belongs to this PyTorch; PyTorch's builds for GPUs bring it."
        yield problem("not installed, so the GPU runs PyTorch's operations only, which is slow", advice)
    elif not HAS_TRITON:
        advice = "Install gcc or clang, or compile the kernels ahead (quire compile --target)."
        yield problem("finds no C compiler, so the GPU runs PyTorch's operations only, which is slow", advice)
    elif not launchers.are_compiled() and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        advice = "Install Python's headers (python3-dev), or compile the kernels ahead (quire compile --target)."
        yield problem("cannot compile its launchers, since Python.h is missing", advice)
    else:
        from importlib.metadata import version

        yield ok(version("triton"))
