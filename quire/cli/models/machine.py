"""This machine's resources for a model: free memory, and the speed of reading it."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.config.engine import CacheConfig
from quire.platform.limits import free_on_host, has_gpu_driver, processors

_BUFFER_BYTES = 32 << 20  # of each thread, twice: more than its part of the caches
_MOST_THREADS = 32  # as many keep the memory of any machine busy
_ROUNDS = 7


@dataclass(frozen=True)
class Machine:
    """device: its displayed name. free: bytes of memory that an engine may use. cache_share: the part of the memory
    after the weights that becomes KV cache by default. bandwidth: bytes per second.
    """

    device: str
    free: int
    cache_share: float
    bandwidth: float


def this_machine() -> Machine:
    """Return the GPU that an engine would choose, or the CPU. Takes a few tenths of a second, and several
    seconds for a GPU.
    """
    if has_gpu_driver():
        import torch  # imported only where there may be a GPU, since it takes seconds

        if torch.cuda.is_available():
            return _gpu(torch)
    free = free_on_host()
    return Machine("CPU", free, 0.5, host_bandwidth(free))


def host_bandwidth(free: int) -> float:
    """Return the bytes per second that all threads together read and write while they copy buffers. free: bytes of
    memory."""
    import numpy as np

    threads = min(processors(), _MOST_THREADS)
    size = max(1 << 20, min(_BUFFER_BYTES, free // (8 * threads)))

    def buffers(_: int) -> tuple[Any, Any]:
        return np.ones(size, np.uint8), np.ones(size, np.uint8)

    with ThreadPoolExecutor(threads) as pool:
        pairs = list(pool.map(buffers, range(threads)))
        return 2 * size * threads / _median_time(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)))


def _gpu(torch: Any) -> Machine:
    free, total = torch.cuda.mem_get_info()
    usable = max(0, int(CacheConfig().gpu_memory_utilization * total) - (total - free))
    size = max(1 << 20, min(256 << 20, usable // 4))
    source, target = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    copy()
    return Machine(torch.cuda.get_device_name(), usable, 1.0, 2 * size / _median_time(copy))


def _median_time(action: Callable[[], object]) -> float:
    """Return the minimum seconds that the action takes. Other programs may disturb some runs."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
