"""Orders to move blocks between the pool and other tiers or engines."""

import zlib

import msgspec

BlockKey = tuple[int, bytes]  # the KV group and the hash of a block: equal keys mean equal content


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """An engine that lets this one read its blocks. name: different after each start. host: an address of its machine.
    ports: one for each rank of its replica."""

    name: str
    host: str
    ports: tuple[int, ...]


class TransferParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's kv_transfer_params, with vLLM's names.

    do_remote_decode: other engines may read the blocks of its prompt. do_remote_prefill: the blocks of its prompt come
    from the engine at remote_host and remote_port, which has or will have a request with the same transfer_id.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str = ""
    remote_host: str = ""
    remote_port: int = 0


def replica_of(transfer_id: str, replicas: int) -> int:
    """Return the replica of a producer that computes a prompt. Every process of the producer chooses the same one."""
    return zlib.crc32(transfer_id.encode()) % replicas


class Transfer(msgspec.Struct, array_like=True, tag=True):
    """Copy blocks to or from a tier, on every rank: block block_ids[i] has the key keys[i].

    number: the transfer's number. tier: the tier's index. slots: the blocks' slots in the tier; an empty list if it
    finds them by their keys. peer: the engine that owns the blocks in `slots`, if it is another one. step: the peer's
    step that computes the last of them; 0 if they have been computed.
    """

    number: int
    tier: int
    is_load: bool
    block_ids: list[int]
    keys: list[BlockKey]
    slots: list[int] = []
    peer: Peer | None = None
    step: int = 0
