"""Engine commands other than requests. The core forwards commands that change memory to its ranks."""

from collections.abc import Sequence
from secrets import token_hex
from typing import Any, Literal

import msgspec

from quire.messages.lora import Adapter

PauseMode = Literal["abort", "wait", "keep"]
WEIGHT_GROUP = "weight_update_group"  # the usual name of a trainer's process group
PROFILE_SECONDS = 600.0  # how long a process may be silent while it writes a trace


class Pause(msgspec.Struct, array_like=True, tag=True):
    """Stop computing until `Resume`; new requests wait.

    mode: unfinished requests end with their output so far ("abort"), finish first ("wait"), or continue after the pause
    ("keep"). clear_cache: drop the prefix cache.
    """

    mode: PauseMode = "abort"
    clear_cache: bool = True


class Resume(msgspec.Struct, array_like=True, tag=True):
    pass


class PinPrefix(msgspec.Struct, array_like=True, tag=True):
    """Pin the cached blocks of a prefix that a request has just computed."""

    id: str
    token_ids: list[int]
    cache_salt: str | None = None
    adapter: Adapter | None = None


class UnpinPrefix(msgspec.Struct, array_like=True, tag=True):
    id: str


class Look(msgspec.Struct, array_like=True, tag=True):
    """Report the engine's activity for display, as JSON. viewer: identifies the viewer; it receives each event since
    its last call once."""

    viewer: str


class Sleep(msgspec.Struct, array_like=True, tag=True):
    """Free the memory of the KV cache and the weights. At level 1, the weights are moved to host memory (on a CPU, they
    stay there); at level 2, they are dropped."""

    level: int


class WakeUp(msgspec.Struct, array_like=True, tag=True):
    """Undo `Sleep` for the weights, for the KV cache (which is then empty), or for both."""

    weights: bool = True
    kv_cache: bool = True


class ReadWeights(msgspec.Struct, array_like=True, tag=True):
    """Read new weights for the same model from a folder, and keep them in addition to the current ones.

    received: use the tensors received by `ReceiveWeights` instead. `directory` is then only a name for them.
    """

    directory: str
    received: bool = False


class TakeWeights(msgspec.Struct, array_like=True, tag=True):
    """Switch to the weights that were read, or drop them."""

    use: bool


class JoinGroup(msgspec.Struct, array_like=True, tag=True):
    """Join a process group. Rank 0 is a trainer, which runs the group's store at the master's address.

    ranks: number of the engine's ranks; the first becomes rank rank_offset of the group. backend: None for the device's
    default. timeout: in seconds, for joining and for each tensor sent later. first: the number of the replica's first
    rank in the engine. key: identifies this order.
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

    name: prefix of its files. replica: the number of the core. has_core: whether the core's process has its own trace
    in addition to those of its ranks. options: the fields of profiler_config."""

    step: Literal["start", "stop", "drop"]
    name: str = ""
    replica: int = 0
    has_core: bool = False
    options: dict[str, Any] = {}


TrainerOrder = JoinGroup | ReceiveWeights | LeaveGroup  # carried out while steps run
MemoryChange = Sleep | WakeUp | ReadWeights | TakeWeights  # while no step is in flight
Change = MemoryChange | Profile
Command = Pause | Resume | PinPrefix | UnpinPrefix | Change


def sleep(level: int) -> Sleep:
    """Create a Sleep. Raises ValueError for levels other than 1 and 2."""
    if level not in (1, 2):
        raise ValueError(f"level must be 1 or 2, got {level}")
    return Sleep(level)


def wake_up(tags: Sequence[str] | None) -> WakeUp:
    """Create a WakeUp. tags: the parts to wake up, None for all. Raises ValueError for tags that vLLM does not have."""
    for tag in tags or ():
        if tag not in ("weights", "kv_cache"):
            raise ValueError(f"tags are weights and kv_cache, got {tag!r}")
    return WakeUp("weights" in tags, "kv_cache" in tags) if tags else WakeUp()
