"""How many threads torch uses in the processes that share a machine."""

import os

import torch

from quire.metrics.logging import logger
from quire.system.limits import processors


def limit_threads(sharing: int) -> int:
    """Limit torch to the processors that may run at once, divided among so many processes. Returns the number.

    torch respects the affinity of the process, but not a cgroup's quota.
    """
    wanted, allowed = torch.get_num_threads(), processors()
    if "OMP_NUM_THREADS" in os.environ:
        return wanted
    if allowed < wanted:
        logger.info("Threads: %d instead of %d, since the cgroup has a quota of processors", allowed, wanted)
    if allowed < wanted or sharing > 1:
        torch.set_num_threads(max(1, min(allowed, wanted) // sharing))
    return torch.get_num_threads()
