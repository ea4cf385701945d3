"""A plugin that makes a step hang, in the ways in which steps of real engines hang."""

from __future__ import annotations

import ctypes
import time

import torch.distributed as dist

from support.faults import Faults

FOREVER = 3600


class Hangs(Faults):
    """As Faults, with "fault" one of "sleep", "locked" (with the interpreter's lock held) and "rank 1", which is a
    sleep on that rank alone, so that the other one waits in a collective."""

    @staticmethod
    def _break(fault: str) -> None:
        if fault == "locked":
            ctypes.PyDLL(None).sleep(FOREVER)
        elif fault == "sleep" or (fault == "rank 1" and dist.get_rank() == 1):
            time.sleep(FOREVER)
        elif fault != "rank 1":
            Faults._break(fault)
