"""The switch from PyTorch's operations to compiled kernels, in an engine that started before these were compiled."""

from collections.abc import Callable

from quire.executor.base import Executor
from quire.messages.engine import EngineCoreRequest
from quire.observability.logging import logger
from quire.ops.cpu.background import Background


class KernelSwitch:
    """A Gate. Seeded requests wait for the compiled kernels: their outputs must be reproducible, but the two kinds of
    kernels round differently.

    background: compiles the kernels, None if there is nothing to wait for.
    """

    def __init__(self, executor: Executor) -> None:
        self.background: Background | None = executor.background
        self._executor = executor
        self._wake: Callable[[], None] = lambda: None
        if self.background is not None:
            logger.warning(
                "The CPU kernels are being compiled in the background. Until then, steps run PyTorch's operations, "
                "which take five times as long or more, and requests with a seed wait."
            )

    @property
    def are_compiling(self) -> bool:
        """Whether the compiled kernels are not in use yet."""
        return self.background is not None

    @property
    def is_due(self) -> bool:
        """Whether the kernels are ready but not in use."""
        return self.background is not None and self.background.has_ended

    def wait(self) -> None:
        """Wait until `is_due`."""
        assert self.background is not None
        self.background.wait()

    def ready(self, request: EngineCoreRequest) -> bool:
        return self.background is None or request.sampling_params is None or request.sampling_params.seed is None

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self.background is not None:
            self.background.connect(wake)

    def switch(self) -> None:
        """Use the kernels if they were compiled successfully. No step may be in flight."""
        assert self.background is not None
        if self.background.problem:
            logger.error(
                "The CPU kernels could not be compiled, so steps run PyTorch's operations. %s", self.background.problem
            )
        else:
            seconds = self.background.seconds
            self._executor.use_compiled()
            logger.info("From now on, steps run the CPU kernels, which were compiled in %.0f s", seconds)
        self.background = None
        self._wake()
