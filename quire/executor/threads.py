"""How many threads torch uses in the processes that share a machine."""

import os

import torch

from quire.observability.logging import logger
from quire.platform.limits import processors


def are_given(option: int | None) -> bool:
    """Whether the user has chosen the number of threads. option: `threads`."""
    return option is not None or "OMP_NUM_THREADS" in os.environ


def limit_threads(sharing: int, option: int | None = None, best: int | None = None) -> int:
    """Limit torch to the processors that may run at once, divided among so many processes. Returns the number.

    torch respects the affinity of the process, but not a cgroup's quota. option: the number that the user has chosen
    for all of these processes. best: the number with which this machine is fastest, if that is known.
    """
    wanted = torch.get_num_threads()
    allowed = processors()
    if option is not None:
        torch.set_num_threads(max(1, option // sharing))
        return torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return wanted
    if allowed < wanted:
        logger.info("Threads: %d instead of %d, since the cgroup has a quota of processors", allowed, wanted)
    chosen = min(allowed, wanted, best or wanted)
    if chosen < wanted or sharing > 1:
        torch.set_num_threads(max(1, chosen // sharing))
    return torch.get_num_threads()
