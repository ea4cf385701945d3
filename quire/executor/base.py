"""The interface through which the engine core runs steps."""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from quire.kv.specs import KVCacheSize
from quire.messages.changes import Change, TrainerOrder
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, StepCosts, TokenMasks
from quire.messages.transfers import Transfer
from quire.ops.cpu.background import Background


class Executor(ABC):
    """Runs steps on all devices, in the order in which they are submitted. Results come in the same order.

    The fault of a device or a process is raised by the first method that notices it, or by a result.
    """

    kv_cache: KVCacheSize
    step_costs: StepCosts
    background: Background | None = None  # compiles kernels for `use_compiled`
    runs_reference: bool = False  # whether steps run PyTorch's operations on a CPU, since kernels are not compiled

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward of a step on all devices. `sample` must have been called for the step before."""

    @abstractmethod
    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Future[ModelRunnerOutput]:
        """Launch the sampling of the step that was submitted last. Its tokens feed the next step on the device.

        masks: which tokens may be sampled at some places of the step. The result says whether the workers skipped the
        step, and which requests they refused.
        """

    @abstractmethod
    def load_adapter(self, key: str, path: str) -> Future[None]:
        """Read an adapter into the CPU memory of all ranks, while steps run. The result raises ValueError if it cannot
        be used. key: the adapter's name in steps. path: its folder."""

    @abstractmethod
    def drop_adapter(self, key: str) -> None:
        """Free an adapter in CPU memory. No later step will put it into a slot, unless it is loaded again."""

    @abstractmethod
    def change(self, change: Change) -> None:
        """Have all ranks change their memory. Blocks until they have. No step may be in flight.

        Raises ValueError if a rank cannot, for example because a checkpoint does not fit the model.
        """

    @abstractmethod
    def exchange(self, order: TrainerOrder) -> Future[None]:
        """Have all ranks join a trainer's process group, or receive weights in it, while steps run. The result raises
        ValueError if a rank cannot, or if the trainer does not answer in time."""

    @abstractmethod
    def transfer(self, order: Transfer) -> Future[list[int]]:
        """Copy blocks between the KV cache and a tier on all ranks, while steps run. The result has the indices of the
        blocks that some rank could not copy."""

    def use_compiled(self) -> None:
        """Load the model again for the kernels that `background` has compiled. No step may be in flight. The KV cache
        keeps its size, and is empty. No later call may name what was installed before."""
        raise NotImplementedError(f"{type(self).__name__} starts with compiled kernels only")

    def processes(self) -> dict[int, int]:
        """The process ids of the ranks that are processes of this machine, by rank."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raises what has broken the executor, perhaps while no result was awaited."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes and threads of the executor. Called once."""
