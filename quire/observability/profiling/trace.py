"""The recording of one process: a trace of torch's profiler, or a recording by Nsight Systems."""

import gzip
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch.profiler import profile, supported_activities

from quire.config.profiler import ProfilerConfig
from quire.messages.changes import Profile
from quire.messages.errors import error_text
from quire.observability.logging import logger


def check_folder(options: ProfilerConfig) -> None:
    """Create the folder for traces, if it is missing. Raises ValueError if no file can be written there."""
    if not options.torch_profiler_dir:
        return
    try:
        os.makedirs(options.torch_profiler_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.torch_profiler_dir):
            pass
    except OSError as error:
        raise ValueError(
            f"profiler_config: torch_profiler_dir {options.torch_profiler_dir} cannot be written: {error_text(error)}"
        ) from error


class TorchTrace:
    """Records the calls of one thread and the GPU's work. `start` and `stop` are called on this thread."""

    def __init__(self, options: ProfilerConfig, name: str) -> None:
        """name: the file name without its suffix. Raises ValueError if the folder cannot be written."""
        check_folder(options)
        self._options = options
        self._name = name
        self._profile: profile | None = None

    def start(self) -> None:
        """Start recording. Raises ValueError if another profiler records this process."""
        if torch._C._autograd._profiler_enabled():
            raise ValueError("another profiler of torch's records this process")
        options = self._options
        self._profile = profile(
            activities=supported_activities(),  # type: ignore[no-untyped-call]
            record_shapes=options.torch_profiler_record_shapes,
            profile_memory=options.torch_profiler_with_memory,
            with_stack=options.torch_profiler_with_stack,
            with_flops=options.torch_profiler_with_flops,
        )
        self._profile.start()

    def stop(self, write: bool) -> None:
        """Stop recording. Creating the trace blocks all threads of this process for seconds. Raises OSError if it
        cannot be written."""
        recorded = self._profile
        self._profile = None
        if recorded is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        recorded.stop()
        if write:
            self._write(recorded)
        # The recording is freed here. When the garbage collector freed it later, Kineto crashed (torch 2.13).
        recorded.profiler = None

    def _write(self, recorded: profile) -> None:
        folder = Path(self._options.torch_profiler_dir)
        file = folder / f"{self._name}.pt.trace.json{'.gz' if self._options.torch_profiler_use_gzip else ''}"
        part = folder / f".{os.getpid()}-{file.name}"  # only complete traces get the final name
        plain = part.with_suffix(".tmp")
        try:
            recorded.export_chrome_trace(str(plain))
            if not plain.exists():  # torch only logs that it failed
                raise OSError(f"torch_profiler_dir {folder}: the trace cannot be written; is the disk full?")
            if self._options.torch_profiler_use_gzip:  # torch compresses line by line, which takes ten times as long
                with plain.open("rb") as source, gzip.open(part, "wb", compresslevel=5) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            else:
                plain.rename(part)
            part.replace(file)
        finally:
            for left in (plain, part, plain.with_name(f"{plain.name}.tmp")):
                left.unlink(missing_ok=True)
        if self._options.torch_profiler_dump_cuda_time_total and torch.cuda.is_available():
            table = recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=100)
            (folder / f"{self._name}.txt").write_text(table + "\n", encoding="utf-8")
        logger.info("Profile written: %s (%.1f MB)", file, file.stat().st_size / 1e6)


class CudaTrace:
    """Starts and stops CUDA's profiler, for `nsys profile --capture-range=cudaProfilerApi`."""

    def __init__(self) -> None:
        """Raises ValueError without a GPU."""
        if not torch.cuda.is_available():
            raise ValueError("profiler_config: profiler 'cuda' needs a GPU; take 'torch'")

    def start(self) -> None:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def stop(self, write: bool) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


Trace = TorchTrace | CudaTrace


def make_trace(options: ProfilerConfig, name: str) -> Trace:
    """Raises ValueError."""
    return CudaTrace() if options.profiler == "cuda" else TorchTrace(options, name)


def rank_name(order: Profile, rank: int) -> str:
    """Return the name of a rank's trace."""
    return f"{order.name}-replica{order.replica}-rank{rank}"


def core_name(order: Profile) -> str:
    """Return the name of a core's trace, if its ranks are other processes."""
    return f"{order.name}-replica{order.replica}-core"
