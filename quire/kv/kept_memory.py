"""CPU memory for blocks that outlives a core: its parent keeps it, and the next core finds it filled."""

import contextlib
import os
import weakref

from quire.config.engine import EngineConfig


class KeptMemory:
    """Memory without a name, as large as `kv_offloading_size` says. It takes up what has been written to it.

    path: the file by which other processes of this user find it, as long as this object exists. It is empty if the
    options ask for none, if ranks run on other machines, or if the system has no such memory: a core then uses memory
    of its own.
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
