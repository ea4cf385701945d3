"""CPU memory for blocks that outlives a core: the parent process owns it, so a restarted core can reuse its content."""

import contextlib
import os
import weakref

from quire.config.engine import EngineConfig


class KeptMemory:
    """Anonymous memory of `kv_offloading_size` bytes. Pages are allocated when they are first written.

    path: the file through which other processes of this user can open it while this object exists. It is empty if
    offloading is off, if ranks run on other machines, or if the system does not support such memory. A core then
    allocates its own memory.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.path = ""
        is_local = config.layout.machines == 1 and config.cluster.distributed_executor_backend != "ray"
        if config.cache.kv_offloading_bytes and is_local and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):
                handle = os.memfd_create("quire-kv", os.MFD_CLOEXEC)
                self._close = weakref.finalize(self, os.close, handle)
                os.ftruncate(handle, config.cache.kv_offloading_bytes)
                self.path = f"/proc/{os.getpid()}/fd/{handle}"
