"""The adapters of one rank: those in CPU memory, and their assignment to slots of the model."""

from pathlib import Path

import msgspec
import torch

from quire.layers.lora import AdapterSlots, Piece
from quire.lora.checkpoint import read_adapter
from quire.messages.step import AdapterPlace, NewRequest
from quire.parallel.mesh import Communicator


class AdapterStore:
    """Adapters by key. `load` may run on any thread; the other methods belong to the thread that runs steps."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self._loaded: dict[str, list[Piece | None]] = {}
        self._keys: list[str | None] = [None] * slots.count

    def load(self, key: str, path: str) -> None:
        """Read an adapter into CPU memory. Raises ValueError if it cannot be used with this model."""
        self._loaded[key] = self.slots.pieces(read_adapter(Path(path)))

    def drop(self, key: str) -> None:
        """Drop an adapter. No later request uses it unless it is loaded again."""
        self._loaded.pop(key, None)

    def install(self, new: NewRequest) -> None:
        """Put the adapter of a new request into its slot. Raises ValueError if it has not been loaded."""
        if new.adapter is not None:
            self.place(new.adapter)

    def place(self, place: AdapterPlace) -> None:
        """Put an adapter into its slot, unless it is already there. Raises ValueError if it has not been loaded."""
        if self._keys[place.slot] == place.key:
            return
        if place.key not in self._loaded:
            raise ValueError("the adapter is not in memory")
        self._keys[place.slot] = None
        self.slots.write(place.slot, self._loaded[place.key])
        self._keys[place.slot] = place.key

    def share(self) -> None:
        """Exchange new adapters with the replicas that share experts. Called once in each step, before its forward."""


class _Placed(msgspec.Struct, array_like=True):
    """An adapter that a replica has put into one of its slots. Its folder has the same path on all machines."""

    slot: int
    path: str


_decoder = msgspec.msgpack.Decoder(list[_Placed])
_PREFIX = 4  # bytes of a message's length


class SharedAdapterStore(AdapterStore):
    """The store of a rank whose experts compute tokens of other replicas: it also has these replicas' adapters.

    Whenever a replica puts an adapter into a slot, all ranks read it before the step that uses it.
    """

    def __init__(self, slots: AdapterSlots, group: Communicator) -> None:
        """group: the ranks that share experts, replica by replica."""
        super().__init__(slots)
        self._group = group
        self._paths: dict[str, str] = {}
        self._placed: list[_Placed] = []  # since the last step

    def load(self, key: str, path: str) -> None:
        super().load(key, path)
        self._paths[key] = path

    def drop(self, key: str) -> None:
        super().drop(key)
        self._paths.pop(key, None)

    def place(self, place: AdapterPlace) -> None:
        before = self._keys[place.slot]
        super().place(place)
        if before != place.key:
            self._placed.append(_Placed(place.slot, self._paths[place.key]))

    def share(self) -> None:
        own = msgspec.msgpack.encode(self._placed) if self._placed else b""
        self._placed = []
        [longest] = self._group.maxima((len(own),))
        if not longest:
            return
        padded = bytearray(len(own).to_bytes(_PREFIX, "little") + own.ljust(longest, b"\0"))
        row = torch.frombuffer(padded, dtype=torch.uint8)[None]
        rows = self._group.gather_equal(row).wait()  # [ranks, size]; the ranks of a replica have the same
        of_replica = self._group.size // self.slots.replicas
        for replica, found in enumerate(rows[::of_replica]):
            length = int.from_bytes(found[:_PREFIX].numpy().tobytes(), "little")
            if replica == self.slots.replica or not length:
                continue
            for placed in _decoder.decode(found[_PREFIX : _PREFIX + length].numpy().tobytes()):
                pieces = self.slots.pieces(read_adapter(Path(placed.path)), only_shared=True)
                self.slots.write_shared(replica, placed.slot, pieces)


def adapter_store(slots: AdapterSlots | None, group: Communicator | None) -> AdapterStore:
    """Return the store of a rank. slots: None without adapters. group: the ranks that share experts, if any."""
    if slots is None:
        return NoAdapters()
    if group is None or slots.replicas == 1 or not any(product.is_shared for product in slots.products):
        return AdapterStore(slots)
    return SharedAdapterStore(slots, group)


class NoAdapters(AdapterStore):
    """The store of a model without adapters. The scheduler rejects requests that name one."""

    def __init__(self) -> None:
        super().__init__(AdapterSlots(0, 0))

    def install(self, new: NewRequest) -> None:
        pass
