"""The interface through which the engine core runs steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from quire.kv.specs import KVCacheSize
from quire.messages.changes import Change, TrainerOrder
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, StepCosts, TokenMasks
from quire.messages.transfers import Transfer
from quire.ops.cpu.background import Background


@dataclass(frozen=True)
class DeferredKernels:
    """Kernels of an engine that starts before they are compiled.

    background: compiles them. use: reloads the model for them. No step may be in flight then. The KV cache keeps its
    size and is empty. Later calls must not refer to requests or adapters that were installed before.
    """

    background: Background
    use: Callable[[], None]


class Executor(ABC):
    """Runs steps on all devices, in the order in which they are submitted. Results come in the same order.

    A device or process failure is raised by the first method that notices it, or by a result.
    """

    kv_cache: KVCacheSize
    step_costs: StepCosts
    deferred_kernels: DeferredKernels | None = None  # None if nothing is left to compile
    runs_reference: bool = False  # whether steps run PyTorch's operations on a CPU, since kernels are not compiled

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward of a step on all devices. `sample` must have been called for the previous step."""

    @abstractmethod
    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Future[ModelRunnerOutput]:
        """Launch the sampling of the last submitted step. Its tokens feed the next step on the device.

        masks: which tokens may be sampled at some places of the step. The result reports whether the workers skipped
        the step, and which requests they refused.
        """

    @abstractmethod
    def load_adapter(self, key: str, path: str) -> Future[None]:
        """Read an adapter into the CPU memory of all ranks, while steps run. The result raises ValueError if it cannot
        be used. key: the adapter's name in steps. path: its folder."""

    @abstractmethod
    def drop_adapter(self, key: str) -> None:
        """Free an adapter in CPU memory. Later steps must not use it unless it is loaded again."""

    @abstractmethod
    def change(self, change: Change) -> None:
        """Apply a memory change on all ranks. Blocks until it is done. No step may be in flight.

        Raises ValueError if a rank cannot, for example because a checkpoint does not fit the model.
        """

    @abstractmethod
    def exchange(self, order: TrainerOrder) -> Future[None]:
        """Join a trainer's process group on all ranks, or receive weights through it, while steps run. The result
        raises ValueError if a rank fails, or if the trainer does not respond in time."""

    @abstractmethod
    def transfer(self, order: Transfer) -> Future[list[int]]:
        """Copy blocks between the KV cache and a tier on all ranks, while steps run. The result contains the indices of
        the blocks that a rank failed to copy."""

    def processes(self) -> dict[int, int]:
        """Return the process ids of the ranks on this machine, by rank."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raises the error that broke the executor, even if no result was awaited."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes and threads of the executor. Called once."""
