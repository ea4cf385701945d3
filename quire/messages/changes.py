"""What an engine can be told besides requests. The core passes those that change memory on to its ranks."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.messages.lora import Adapter

PauseMode = Literal["abort", "wait", "keep"]


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


class Sleep(msgspec.Struct, array_like=True, tag=True):
    """Give back the memory of the KV cache, and that of the weights: at level 1 their values move to the host's memory
    (where they stay on a CPU), at level 2 they are dropped."""

    level: int


class WakeUp(msgspec.Struct, array_like=True, tag=True):
    """Undo `Sleep` for the weights, for the KV cache (which is empty then), or for both."""

    weights: bool = True
    kv_cache: bool = True


class ReadWeights(msgspec.Struct, array_like=True, tag=True):
    """Read other weights for the same model from a folder, and keep them beside those in use."""

    directory: str


class TakeWeights(msgspec.Struct, array_like=True, tag=True):
    """Use the weights that were read, or drop them."""

    use: bool


Change = Sleep | WakeUp | ReadWeights | TakeWeights  # of a rank's memory, while no step is in flight
Command = Pause | Resume | PinPrefix | UnpinPrefix | Change


def wake_up(tags: Sequence[str] | None) -> WakeUp:
    """tags: what wakes up, None for all. Raises ValueError for others than vLLM's."""
    for tag in tags or ():
        if tag not in ("weights", "kv_cache"):
            raise ValueError(f"tags are weights and kv_cache, got {tag!r}")
    return WakeUp("weights" in tags, "kv_cache" in tags) if tags else WakeUp()
