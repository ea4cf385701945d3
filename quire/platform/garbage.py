"""Python's garbage collector at the end of a process."""

import gc
import sys


def skip_last_collection() -> None:
    """Let the process end without Python's last garbage collection, which takes half a second for torch's objects.

    If Triton was imported, the collection runs: Triton's bindings would report all remaining objects as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()
