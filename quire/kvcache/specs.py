"""What a layer keeps for a token, and for how long: layers of one kind form a KV group with its own block table.

Block ids come from one pool and belong to one group at a time. Group g's j-th layer keeps block b in cache tensor j,
so groups share memory, and a model needs as many cache tensors as its largest group has layers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """The layers that keep the same tokens. window: tokens that a query sees, itself included; None is all."""

    layers: tuple[int, ...]
    window: int | None = None

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """The first token that a query at position `num_computed_tokens` still sees."""
        return 0 if self.window is None else max(0, num_computed_tokens - self.window + 1)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Blocks that a request of `num_tokens` holds at most at once when a step computes at most `chunk` tokens."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + chunk) // block_size) + 1)


@dataclass(frozen=True)
class KVCacheSize:
    """The cache as the workers made it, the same on every rank. block_bytes: of one block in all layers of a rank."""

    num_blocks: int
    block_bytes: int
    specs: tuple[KVCacheSpec, ...]


def group_layers(windows: list[int | None]) -> list[KVCacheSpec]:
    """Group the layers (windows[i] is layer i's) into one spec for each kind, full attention first."""
    kinds = sorted(set(windows), key=lambda w: (w is not None, w or 0))
    return [KVCacheSpec(tuple(i for i, w in enumerate(windows) if w == kind), kind) for kind in kinds]
