"""Orders to move blocks between the pool and what lies beyond it."""

import msgspec

BlockKey = tuple[int, bytes]  # the KV group and the hash of a block: equal keys mean equal content


class Transfer(msgspec.Struct, array_like=True, tag=True):
    """Copy blocks to or from a tier, on every rank: block block_ids[i] has the key keys[i].

    number: of the transfer. tier: the tier's index. slots: where the blocks are in the tier; an empty list if it finds
    them by their keys.
    """

    number: int
    tier: int
    is_load: bool
    block_ids: list[int]
    keys: list[BlockKey]
    slots: list[int] = []
