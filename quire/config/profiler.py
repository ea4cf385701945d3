"""The fields of the option profiler_config, with vLLM's names."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from quire.config.declaration import AtLeast0, AtLeast1, ConfigError, read_object


@dataclass(frozen=True)
class ProfilerConfig:
    """The content of a profile, and the steps that it records.

    profiler: "torch" writes a trace for each process to torch_profiler_dir; "cuda" starts and stops the recording of
    Nsight Systems. Steps are counted from the start of the profile: delay_iterations and wait_iterations are skipped,
    warmup_iterations are recorded and dropped, and the recording ends after max_iterations, or after active_iterations
    if there is a warm-up. max_iterations=0: until the profile is stopped. ignore_frontend is vLLM's, and has no effect:
    the processes of the API are never recorded.
    """

    profiler: Literal["torch", "cuda"] | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    capture_torch_profiler: bool = False
    detailed_trace_annotation: bool = False
    ignore_frontend: bool = False
    delay_iterations: AtLeast0 = 0
    max_iterations: AtLeast0 = 0
    warmup_iterations: AtLeast0 = 0
    active_iterations: AtLeast1 = 5
    wait_iterations: AtLeast0 = 0

    def __post_init__(self) -> None:
        folder = self.torch_profiler_dir
        if self.profiler == "torch" and not folder:
            raise ConfigError("profiler 'torch' needs torch_profiler_dir, the folder for its traces")
        if self.profiler != "torch" and folder:
            raise ConfigError("torch_profiler_dir needs profiler to be 'torch'")
        if "://" in folder:
            raise ConfigError(f"torch_profiler_dir must be a folder, and cannot be the address {folder!r}")
        for name in ("capture_torch_profiler", "detailed_trace_annotation"):
            if getattr(self, name):
                raise ConfigError(f"{name} is not supported by Quire yet")
        if folder:
            object.__setattr__(self, "torch_profiler_dir", os.path.abspath(os.path.expanduser(folder)))

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for an unknown or invalid field."""
        return read_object("profiler_config", given, cls)

    @property
    def plan(self) -> list[tuple[int, str]]:
        """The action before each step: "start" (which drops earlier recordings) and "stop"."""
        first = self.delay_iterations + self.wait_iterations
        plan = [(first, "start")]
        if self.warmup_iterations:
            first += self.warmup_iterations
            plan.append((first, "start"))
        if length := self.active_iterations if self.warmup_iterations else self.max_iterations:
            plan.append((first + length, "stop"))
        return plan
