"""Configures when Python's garbage collector runs in Quire's own processes."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def collect_rarely() -> None:
    """Run a collection only after 100,000 new objects, instead of 700."""
    gc.set_threshold(100_000)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable collection during imports, which create hundreds of thousands of objects and hardly any garbage. Later
    collections skip the objects that exist at the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def skip_last_collection() -> None:
    """End the process without Python's last garbage collection, which takes half a second for torch's objects.

    If Triton was imported, the collection runs: Triton's bindings would report all remaining objects as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()
