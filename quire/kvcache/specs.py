"""What a layer keeps for a token, and for how long: layers of one kind form a KV group with its own block table.

Block ids come from one pool and belong to one group at a time. Group g's j-th layer keeps block b in cache tensor j,
so groups share memory, and a model needs as many cache tensors as its largest group has layers.
"""

from dataclasses import dataclass
from itertools import pairwise


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


def group_layers(windows: list[int | None], max_model_len: int) -> list[KVCacheSpec]:
    """Group the layers (windows[i] is layer i's), full attention first, so that a long request wastes little memory.

    A block takes the memory of as many layers as the largest group has. Ten layers with full attention beside 52 with
    a window must not be two groups, or each block of the ten takes the memory of 52: the 52 are cut into six groups.
    Of the sizes that waste at most 5 % of what a request of max_model_len keeps, the largest is taken, since each
    group costs the scheduler and every step a little time.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)

    def memory(size: int) -> int:
        """Tokens x layers whose memory a request of max_model_len takes if groups have `size` layers."""
        groups = {window: -(-len(layers) // size) for window, layers in kinds.items()}
        return sum(count * size * min(window or max_model_len, max_model_len) for window, count in groups.items())

    sizes = range(1, max(map(len, kinds.values())) + 1)
    least = memory(1)
    size = max(size for size in sizes if memory(size) <= 1.05 * least)
    specs = []
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):
        layers, count = kinds[window], -(-len(kinds[window]) // size)
        ends = [len(layers) * i // count for i in range(count + 1)]
        specs += [KVCacheSpec(tuple(layers[a:b]), window) for a, b in pairwise(ends)]
    return specs
