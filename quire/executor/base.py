"""What the engine core asks of whatever runs its steps."""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from quire.kvcache.specs import KVCacheSize
from quire.messages.step import ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Runs steps on all devices. Steps are submitted and sampled in order; results come in that order."""

    kv_cache: KVCacheSize

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward on all devices. Raises RequestError, before any launch, if a request cannot be run."""

    @abstractmethod
    def sample(self, step_id: int) -> Future[ModelRunnerOutput]:
        """Launch the sampling of the step that was submitted last; its tokens feed the next step on the device."""

    @abstractmethod
    def shutdown(self) -> None:
        """End what was started. Called once."""
