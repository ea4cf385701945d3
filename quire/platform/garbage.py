"""When Python's garbage collector runs in a process of Quire's own."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def collect_rarely() -> None:
    """Let a collection wait for 100,000 new objects, instead of 700."""
    gc.set_threshold(100_000)


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports: they create hundreds of thousands of objects, hardly any of which becomes garbage.

    The objects that exist at the end stay out of later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def skip_last_collection() -> None:
    """Let the process end without Python's last garbage collection, which takes half a second for torch's objects.

    If Triton was imported, the collection runs: Triton's bindings would report all remaining objects as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()
