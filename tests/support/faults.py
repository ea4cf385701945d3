"""A plugin that makes the engine fail within a step, in the ways in which real engines fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces

FAULTS = ["exception", "memory", "kill", "stop"]


class Faults(LogitsProcessor):
    """extra_args={"fault": one of FAULTS, "at": output position, "once": a file}.

    The file is optional. The fault creates it, and does not occur if it exists.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._asked: dict[int, dict[str, object]] = {}

    def add(self, row: int, request: NewRequest) -> bool:
        self._asked.pop(row, None)
        arguments = request.sampling_params.extra_args or {}
        if "fault" in arguments:
            self._asked[row] = arguments
        return row in self._asked

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        for row, position in zip(at.rows.tolist(), at.num_output.tolist(), strict=True):
            arguments = self._asked[row]
            if position >= arguments["at"] and not ("once" in arguments and Path(arguments["once"]).exists()):
                if "once" in arguments:
                    Path(arguments["once"]).touch()
                self._break(str(arguments["fault"]))

    @staticmethod
    def _break(fault: str) -> None:
        if fault == "exception":
            raise RuntimeError("injected: something in the step is wrong")
        if fault == "memory":
            torch.empty(1 << 62, dtype=torch.uint8)  # more than any machine has
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
