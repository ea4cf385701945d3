"""Chooses how many threads torch uses in processes that share a machine."""

import os

import torch

from quire.observability.logging import logger
from quire.platform.limits import processors


def are_given(option: int | None) -> bool:
    """Whether the user has chosen the number of threads. option: `threads`."""
    return option is not None or "OMP_NUM_THREADS" in os.environ


def choose_threads(sharing: int, option: int | None = None, best: int | None = None) -> int:
    """Return the number of threads for each of `sharing` processes, which divide the available processors.

    torch respects the affinity of the process, but not a cgroup's quota. option: the number that the user has chosen
    for all of these processes. best: the fastest number on this machine, if known.
    """
    if option is not None:
        return max(1, option // sharing)
    wanted = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return wanted
    allowed = processors()
    if allowed < wanted:
        logger.info("Threads: %d instead of %d, since the cgroup has a quota of processors", allowed, wanted)
    return max(1, min(allowed, wanted, best or wanted) // sharing)


def limit_threads(sharing: int, option: int | None = None, best: int | None = None) -> int:
    """Limit torch to the chosen threads. Returns the number."""
    chosen = choose_threads(sharing, option, best)
    use_threads(chosen)
    return chosen


def use_threads(number: int) -> None:
    """Set the number of torch threads in this process."""
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
