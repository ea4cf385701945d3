"""The fields of the option profiler_config, with vLLM's names."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from quire.config.declaration import ConfigError, check_type

_NUMBERS = ("delay_iterations", "wait_iterations", "warmup_iterations", "max_iterations")
_NOT_SUPPORTED = ("capture_torch_profiler", "detailed_trace_annotation")


@dataclass(frozen=True)
class ProfilerConfig:
    """What a profile records, and which steps.

    profiler: "torch" writes a trace for each process to torch_profiler_dir; "cuda" starts and stops the recording of
    Nsight Systems. Steps are counted from the start of the profile: delay_iterations and wait_iterations are left out,
    those of warmup_iterations are recorded and dropped, and the recording ends after max_iterations, or after
    active_iterations if there is a warm-up. 0 of max_iterations: until the profile is stopped. ignore_frontend is
    vLLM's, and has no effect: the processes of the API are never recorded.
    """

    profiler: str | None = None
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
    delay_iterations: int = 0
    max_iterations: int = 0
    warmup_iterations: int = 0
    active_iterations: int = 5
    wait_iterations: int = 0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The folder of the result is absolute. Raises ConfigError for a field that is unknown or wrong."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"profiler_config has no field {name!r}: {', '.join(known)}")
            check_type(f"profiler_config: {name}", value, known[name])
        options = cls(**given)
        options._check_profiler()
        for name in _NOT_SUPPORTED:
            if getattr(options, name):
                raise ConfigError(f"profiler_config: {name} is not supported by Quire yet")
        for name, minimum in (*((name, 0) for name in _NUMBERS), ("active_iterations", 1)):
            if getattr(options, name) < minimum:
                raise ConfigError(f"profiler_config: {name} must be at least {minimum}, got {getattr(options, name)}")
        if not options.torch_profiler_dir:
            return options
        folder = os.path.abspath(os.path.expanduser(options.torch_profiler_dir))
        return cls(**{**given, "torch_profiler_dir": folder})

    def _check_profiler(self) -> None:
        """Raises ConfigError if there is no such profiler, or if it does not go with torch_profiler_dir."""
        if self.profiler not in (None, "torch", "cuda"):
            raise ConfigError(f"profiler_config: profiler must be 'torch' or 'cuda', got {self.profiler!r}")
        if self.profiler == "torch" and not self.torch_profiler_dir:
            raise ConfigError("profiler_config: profiler 'torch' needs torch_profiler_dir, the folder for its traces")
        if self.profiler != "torch" and self.torch_profiler_dir:
            raise ConfigError("profiler_config: torch_profiler_dir needs profiler to be 'torch'")
        if "://" in self.torch_profiler_dir:
            raise ConfigError(
                "profiler_config: torch_profiler_dir must be a folder, and cannot be the address "
                f"{self.torch_profiler_dir!r}"
            )

    @property
    def plan(self) -> list[tuple[int, str]]:
        """What happens before which step: "start" (which drops what was recorded before) and "stop"."""
        first = self.delay_iterations + self.wait_iterations
        plan = [(first, "start")]
        if self.warmup_iterations:
            first += self.warmup_iterations
            plan.append((first, "start"))
        if length := self.active_iterations if self.warmup_iterations else self.max_iterations:
            plan.append((first + length, "stop"))
        return plan
