"""What the engine core asks of whatever runs its steps."""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from quire.kvcache.specs import KVCacheSize
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks


class Executor(ABC):
    """Runs steps on all devices, in the order in which they are submitted. Their results come in the same order.

    A fault of a device or a process is raised by the method that notices it first, or by a result.
    """

    kv_cache: KVCacheSize

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward on all devices. The step that was submitted before has been told to sample."""

    @abstractmethod
    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Future[ModelRunnerOutput]:
        """Launch the sampling of the step that was submitted last. Its tokens feed the next step on the device.

        masks: which tokens may be drawn at some places of the step. A step that the workers skipped, and the refusals
        that made them skip it, are told by its result.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End what was started. Called once."""
