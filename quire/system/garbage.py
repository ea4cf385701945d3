"""Python's garbage collector at the end of a process."""

import gc
import sys


def skip_last_collection() -> None:
    """Let the process end without Python's last search for garbage, which takes half a second over torch's objects.

    Where Triton was imported, the search stays: Triton's bindings would report every object that is left as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()
