"""torch.profiler on the simulated GPU (tracing.py)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.tracing import TracedStandIn


def stand_in_profiler(device: TracedStandIn) -> Any:
    """Return a context in which torch.profiler.profile records launches on the device."""
    return mock.patch.object(torch.profiler, "profile", partial(Profiler, device))


class Profiler:
    """torch.profiler.profile for the stand-in. A launch of a Triton kernel or of a torch matrix product is a device
    event of 1 us.
    """

    def __init__(self, device: TracedStandIn, **options: Any) -> None:
        self._traced = device.traced()

    def __enter__(self) -> Profiler:
        self._launches = self._traced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._traced.__exit__(*error)

    def events(self) -> list[Any]:
        products = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
        names = [x.name for x in self._launches if x.kernel is not None or x.name in products]
        device_type = torch.autograd.DeviceType.CUDA
        return [
            SimpleNamespace(name=name, device_type=device_type, time_range=SimpleNamespace(start=i, end=i + 1))
            for i, name in enumerate(names)
        ]

    def export_chrome_trace(self, path: str) -> None:
        events = [{"name": e.name, "ph": "X", "ts": e.time_range.start, "dur": 1} for e in self.events()]
        Path(path).write_text(json.dumps({"traceEvents": events}))
