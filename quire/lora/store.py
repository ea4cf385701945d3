"""The adapters of one rank: those in CPU memory, and their assignment to slots of the model."""

from pathlib import Path

from quire.layers.lora import AdapterSlots, Piece
from quire.lora.checkpoint import read_adapter
from quire.messages.step import AdapterPlace, NewRequest


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


class NoAdapters(AdapterStore):
    """The store of a model without adapters. The scheduler rejects requests that name one."""

    def __init__(self) -> None:
        super().__init__(AdapterSlots(0, 0))

    def install(self, new: NewRequest) -> None:
        pass
