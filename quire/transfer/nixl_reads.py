"""Reads between ranks that both have NIXL (github.com/ai-dynamo/nixl), NVIDIA's library for moving memory between
machines. It chooses the path, such as RDMA or NVLink, and needs no copy in CPU memory.

The agents receive each other's metadata through the authenticated messages of this package. Their own network traffic
is not authenticated. A transfer that times out is cancelled; on networks that cannot cancel transfers, it may still
write into blocks after they were released.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.transfer.layout import Run
from quire.transfer.messages import Hello, NixlAddress
from quire.transfer.sources import Blocks, Pairs

_SPINS = 100  # polls of a transfer without a pause, since a short transfer takes less time than a pause
_PAUSE_SECONDS = 50e-6


class NixlMemory:
    """This rank's KV cache, registered with a NIXL agent. lock: held during each call, as agents require."""

    def __init__(self, blocks: Tensor, library: Any) -> None:
        """blocks: uint8 [num_blocks, block_bytes]. library: the module nixl._api. Raises NIXL's exceptions."""
        self.lock = threading.Lock()
        self.blocks, self.address = blocks, blocks.data_ptr()
        self.memory, self.number = ("VRAM", blocks.get_device()) if blocks.is_cuda else ("DRAM", 0)
        self.agent = library.nixl_agent(f"quire-{uuid.uuid4().hex}", library.nixl_agent_config(backends=["UCX"]))
        self._region = self.agent.register_memory([(self.address, blocks.nbytes, self.number, "")], self.memory)

    @classmethod
    def make(cls, blocks: Tensor) -> "NixlMemory | None":
        """Register the blocks. Returns None if NIXL is not installed or cannot be used here."""
        try:
            from nixl import _api
        except ImportError:
            return None
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
        try:
            return cls(blocks, _api)
        except Exception as error:  # NIXL's exceptions have no common base class
            logger.warning("NIXL cannot be used: %s", error_text(error))
            return None

    def describe(self) -> NixlAddress:
        return NixlAddress(self.agent.get_agent_metadata(), self.memory, self.number, self.address)

    def close(self) -> None:
        with self.lock:
            self.agent.deregister_memory(self._region)
            del self.agent  # the agent has a thread that polls until it is deleted


class NixlSource:
    """Reads blocks of one other rank directly into this rank's KV cache."""

    def __init__(self, own: NixlMemory, hello: Hello, timeout: float) -> None:
        """Raises OSError if the other rank has no NIXL."""
        if hello.nixl is None:
            raise ConnectionError("it has no NIXL")
        self._own = own
        self._other = hello.nixl
        self._timeout = timeout
        self._num_blocks = hello.num_blocks
        self._block_bytes = hello.layout.block_bytes
        self._name = self._call(own.agent.add_remote_agent, hello.nixl.agent)

    def read(self, pairs: Pairs, runs: Sequence[Run], blocks: Blocks) -> None:
        """Read into this rank's KV cache; `blocks` is not used. Raises OSError if the transfer fails or times out."""
        own = self._own
        other = self._other
        agent = self._own.agent
        if own.blocks.data_ptr() != own.address:
            raise ConnectionError("the KV cache has moved since NIXL learned about it")
        if any(not 0 < block_id < self._num_blocks for block_id, _ in pairs):
            raise ValueError(f"a block is not one of the blocks 1 to {self._num_blocks - 1}")
        size = own.blocks.shape[1]
        targets = [(own.address + i * size + start, n, own.number) for _, i in pairs for _, start, n in runs]
        sources = [
            (other.address + i * self._block_bytes + start, n, other.number) for i, _ in pairs for start, _, n in runs
        ]
        into = self._call(agent.get_xfer_descs, targets, own.memory)
        origin = self._call(agent.get_xfer_descs, sources, other.memory)
        handle = self._call(agent.initialize_xfer, "READ", into, origin, self._name)
        try:
            ends = time.monotonic() + self._timeout
            looks = 0
            state = self._call(agent.transfer, handle)
            while state == "PROC":
                looks += 1
                if looks > _SPINS:
                    time.sleep(_PAUSE_SECONDS)
                if time.monotonic() > ends:
                    raise TimeoutError(f"NIXL has not read its blocks within {self._timeout:.0f} s")
                state = self._call(agent.check_xfer_state, handle)
            if state != "DONE":
                raise ConnectionError("NIXL could not read its blocks")
        finally:
            self._call(agent.release_xfer_handle, handle)  # cancels a running transfer

    def interrupt(self) -> None:
        """Do nothing: a transfer ends by itself, or after the timeout."""

    def close(self) -> None:
        self._call(self._own.agent.remove_remote_agent, self._name)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the agent. Raises ConnectionError in place of NIXL's exceptions."""
        with self._own.lock:
            try:
                return method(*arguments)
            except Exception as error:
                raise ConnectionError(f"NIXL: {error_text(error)}") from error
