"""What an engine can be told besides requests. The core passes those that change memory on to its ranks."""

from collections.abc import Sequence
from secrets import token_hex
from typing import Any, Literal

import msgspec

from quire.messages.lora import Adapter

PauseMode = Literal["abort", "wait", "keep"]
WEIGHT_GROUP = "weight_update_group"  # the usual name of a trainer's process group
PROFILE_SECONDS = 600.0  # how long a process may be silent while it writes a trace


class Pause(msgspec.Struct, array_like=True, tag=True):
    """Compute nothing until `Resume`; requests that come wait.

    mode: what becomes of the others: they are ended with what they have ("abort"), finish before ("wait"), or go on
    behind the pause ("keep"). clear_cache: forget the prefix cache.
    """

    mode: PauseMode = "abort"
    clear_cache: bool = True


class Resume(msgspec.Struct, array_like=True, tag=True):
    pass


class PinPrefix(msgspec.Struct, array_like=True, tag=True):
    """Keep the cached blocks of a prefix that a request has just computed."""

    id: str
    token_ids: list[int]
    cache_salt: str | None = None
    adapter: Adapter | None = None


class UnpinPrefix(msgspec.Struct, array_like=True, tag=True):
    id: str


class Look(msgspec.Struct, array_like=True, tag=True):
    """Say what the engine does, for people who watch it. The answer is JSON. viewer: who looks; what has happened since
    it looked last is told once."""

    viewer: str


class Sleep(msgspec.Struct, array_like=True, tag=True):
    """Give back the memory of the KV cache, and that of the weights: at level 1 their values move to the host's memory
    (where they stay on a CPU), at level 2 they are dropped."""

    level: int


class WakeUp(msgspec.Struct, array_like=True, tag=True):
    """Undo `Sleep` for the weights, for the KV cache (which is empty then), or for both."""

    weights: bool = True
    kv_cache: bool = True


class ReadWeights(msgspec.Struct, array_like=True, tag=True):
    """Read other weights for the same model from a folder, and keep them beside those in use.

    received: take the tensors that came by `ReceiveWeights` instead. `directory` is then only a name for them.
    """

    directory: str
    received: bool = False


class TakeWeights(msgspec.Struct, array_like=True, tag=True):
    """Use the weights that were read, or drop them."""

    use: bool


class JoinGroup(msgspec.Struct, array_like=True, tag=True):
    """Join a process group. Its rank 0 is a trainer, which has the group's store at the master's address.

    ranks: of the engine, of which the first gets the number rank_offset in the group. backend: None for the usual one
    of the device. timeout: in seconds, of joining and of each tensor that is sent later. first: the number of the
    replica's first rank in the engine. key: of this order.
    """

    ranks: int
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    group_name: str = WEIGHT_GROUP
    backend: str | None = None
    timeout: float = 60.0
    first: int = 0
    key: str = msgspec.field(default_factory=lambda: token_hex(8))


class ReceiveWeights(msgspec.Struct, array_like=True, tag=True):
    """Receive tensors in a trainer's process group, and keep them until they are read."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = WEIGHT_GROUP
    key: str = msgspec.field(default_factory=lambda: token_hex(8))


class LeaveGroup(msgspec.Struct, array_like=True, tag=True):
    """Leave a trainer's process group, if the rank is in it."""

    group_name: str = WEIGHT_GROUP
    key: str = msgspec.field(default_factory=lambda: token_hex(8))


class Profile(msgspec.Struct, array_like=True, tag=True):
    """Start or stop a profile (see quire.observability.profiling), or drop it if it has this name.

    name: of its files. replica: the number of the core. has_core: whether the core's process has a trace of its own,
    beside those of its ranks. options: the fields of profiler_config."""

    step: Literal["start", "stop", "drop"]
    name: str = ""
    replica: int = 0
    has_core: bool = False
    options: dict[str, Any] = {}


TrainerOrder = JoinGroup | ReceiveWeights | LeaveGroup  # with a trainer, while steps run
MemoryChange = Sleep | WakeUp | ReadWeights | TakeWeights  # of a rank's memory, while no step is in flight
Change = MemoryChange | Profile
Command = Pause | Resume | PinPrefix | UnpinPrefix | Change


def sleep(level: int) -> Sleep:
    """Raises ValueError for other levels than 1 and 2."""
    if level not in (1, 2):
        raise ValueError(f"level must be 1 or 2, got {level}")
    return Sleep(level)


def wake_up(tags: Sequence[str] | None) -> WakeUp:
    """tags: what wakes up, None for all. Raises ValueError for others than vLLM's."""
    for tag in tags or ():
        if tag not in ("weights", "kv_cache"):
            raise ValueError(f"tags are weights and kv_cache, got {tag!r}")
    return WakeUp("weights" in tags, "kv_cache" in tags) if tags else WakeUp()
