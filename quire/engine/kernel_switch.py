"""The switch from PyTorch's operations to compiled kernels, in an engine that started before these were compiled."""

from collections.abc import Callable

from quire.executor.base import DeferredKernels
from quire.messages.engine import EngineCoreRequest
from quire.observability.logging import logger


class KernelSwitch:
    """A Gate. Seeded requests wait for the compiled kernels: their outputs must be reproducible, but the two kinds of
    kernels round differently.

    """

    def __init__(self, deferred: DeferredKernels | None) -> None:
        """deferred: None if the engine uses its kernels from the start."""
        self._deferred = deferred
        self._wake: Callable[[], None] = lambda: None
        if deferred is not None:
            logger.warning(
                "The CPU kernels are being compiled in the background. Until then, steps run PyTorch's operations, "
                "which take five times as long or more, and requests with a seed wait."
            )

    @property
    def are_compiling(self) -> bool:
        """Whether the compiled kernels are not in use yet."""
        return self._deferred is not None

    @property
    def is_due(self) -> bool:
        """Whether the kernels are ready but not in use."""
        return self._deferred is not None and self._deferred.background.has_ended

    def wait(self) -> None:
        """Wait until `is_due`."""
        assert self._deferred is not None
        self._deferred.background.wait()

    def ready(self, request: EngineCoreRequest) -> bool:
        return self._deferred is None or request.sampling_params is None or request.sampling_params.seed is None

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._deferred is not None:
            self._deferred.background.connect(wake)

    def switch(self) -> None:
        """Use the kernels if they were compiled successfully. No step may be in flight."""
        assert self._deferred is not None
        background = self._deferred.background
        if background.problem:
            logger.error(
                "The CPU kernels could not be compiled, so steps run PyTorch's operations. %s", background.problem
            )
        else:
            self._deferred.use()
            logger.info("From now on, steps run the CPU kernels, which were compiled in %.0f s", background.seconds)
        self._deferred = None
        self._wake()
