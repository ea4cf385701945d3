"""Streams and events of the simulated GPU. Nothing is computed, so a stream never has unfinished work. But
while a graph is captured, whatever CUDA forbids raises an error, as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class Streams:
    """The streams of a GPU, and the rules of a capture in torch's default mode ("global"): they apply to all threads.

    Source: CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture".
    """

    def __init__(self) -> None:
        self.stream_class = type("Stream", (Stream,), {"_streams": self})
        self.event_class = type("Event", (Event,), {"_streams": self})
        self.default: Stream = self.stream_class()
        self._of_thread = threading.local()
        self._origin: Stream | None = None  # the stream on which the capture began; None without a capture
        self._captured: dict[Stream, bool] = {}  # streams of the capture; whether the origin must still wait for them
        self._is_broken = False
        self._loaded: set[str] = set()  # kernels
        self.register_status = 0  # what cudaHostRegister returns; 0 is success
        self._last_error = 0  # which the next launch reports and clears

    @property
    def is_capturing(self) -> bool:
        return self._origin is not None

    @property
    def checks_work(self) -> bool:
        """Whether `submit` must be called for work."""
        return self._origin is not None or self._last_error != 0

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._of_thread, "stream", self.default)
        return stream

    @contextlib.contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        before = self.current
        self._of_thread.stream = stream or before
        try:
            yield
        finally:
            self._of_thread.stream = before

    def forbid(self, action: str) -> None:
        """Called for an action that is not allowed during a capture. Raises RuntimeError during one."""
        if self._origin is not None:
            self._is_broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {action}")

    def submit(self, name: str) -> None:
        """Called for work on the current stream, such as a launch or an allocation of memory."""
        if self._last_error:
            error = self._last_error
            self._last_error = 0
            raise RuntimeError(f"CUDA error {error}, reported by {name}")
        if self._origin is None:
            return
        if self._is_broken:
            raise RuntimeError(f"operation failed due to a previous error during capture: {name}")
        stream = self.current
        if stream not in self._captured:
            self.forbid(f"{name} on a stream that is not captured, with memory from outside of the graph's pool")
        self._captured[stream] = stream is not self._origin

    def load(self, kernel: str, name: str) -> None:
        """Called before each launch of a Triton kernel. kernel: its hash. The first launch loads it."""
        if kernel not in self._loaded:
            self.forbid(f"the first launch of {name} loads it onto the device")
            self._loaded.add(kernel)

    def begin(self) -> None:
        if self._origin is not None:
            self.forbid("another capture begins")
        if self.current is self.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._origin = self.current
        self._captured = {self._origin: False}
        self._is_broken = False

    def end(self) -> None:
        """Raises RuntimeError if the capture has failed."""
        unjoined = any(self._captured.values())
        was_broken = self._is_broken or self.current is not self._origin
        self._origin = None
        self._captured = {}
        if was_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        if unjoined:
            raise RuntimeError("capturing stream has unjoined work")

    def contains(self, stream: Stream) -> bool:
        """Whether a stream takes part in the current capture."""
        return stream in self._captured

    def order(self, later: Stream, earlier: Stream, *, is_captured: bool) -> None:
        """A stream waits for work of another one. is_captured: whether that work belongs to the current capture."""
        if is_captured:
            self._captured.setdefault(later, False)
            self._captured[earlier] = False
            if later is not self._origin:
                self._captured[later] = True
        elif later in self._captured and later is not earlier:
            self.forbid("a captured stream waits for work from outside of the capture")

    def replacements(self) -> dict[str, Any]:
        """Replacements for functions and classes of torch.cuda."""
        return {
            "Stream": self.stream_class,
            "Event": self.event_class,
            "current_stream": lambda *_: self.current,
            "default_stream": lambda *_: self.default,
            "stream": self.use,
            "synchronize": lambda *_: self.forbid("the host waits for the device"),
            "empty_cache": lambda: self.forbid("memory is given back"),
            "_sleep": lambda *_: self.submit("_sleep"),
            "is_current_stream_capturing": lambda: self.contains(self.current),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._register),
        }

    def _register(self, address: int, size: int, flags: int) -> int:
        """Pin host memory. An error stays until a launch reports it, as in CUDA's runtime."""
        self._last_error = self.register_status
        return self.register_status


class Event:
    _streams: Streams  # of a subclass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Stream | None = None  # on which it was recorded last
        self.is_captured = False  # it then belongs to a graph, and the host cannot wait for it

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self._streams.current
        self.is_captured = self._streams.contains(self.stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._streams.forbid("the host waits for an event")
        if self.is_captured:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")

    def elapsed_time(self, end: Any) -> float:
        return 1.0  # milliseconds


class Stream:
    _streams: Streams  # of a subclass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        recorded: Event = event or self._streams.event_class()
        recorded.record(self)
        return recorded

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self._streams.order(self, event.stream, is_captured=event.is_captured and self._streams.is_capturing)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._streams.forbid("the host waits for a stream")
