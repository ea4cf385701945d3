"""Gives each replica its own GPUs. Importing this file does not import torch."""

import ctypes
import os
import subprocess
import sys

from quire.config.engine import ConfigError, EngineConfig


def take_devices(rank: int, config: EngineConfig) -> None:
    """Restrict a replica to its own GPUs, which follow those of lower-numbered replicas on this machine. Raises
    ConfigError if there are too few.

    CUDA reads CUDA_VISIBLE_DEVICES when it is initialized, which importing the engine's operations does. So this
    function must be called first.
    """
    here = config.layout.here
    if config.kernels.device == "cpu" or len(here) == 1:
        return
    size = config.parallel.ranks
    count = _count_gpus()
    if not count:
        return
    if count < len(here) * size:
        option = "data_parallel_size" + ("_local" if config.cluster.data_parallel_size_local is not None else "")
        raise ConfigError(f"{option}={len(here)} needs {len(here) * size} GPUs, but there are {count}")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = here.index(rank) * size
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + size])


def _count_gpus() -> int:
    """Count the GPUs without initializing CUDA in this process. torch can do so with NVIDIA's management library;
    without that library, such as in a container, another process counts."""
    import torch

    if not torch.backends.cuda.is_built() or _has_management_library():  # type: ignore[no-untyped-call]
        return torch.cuda.device_count()
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _has_management_library() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
