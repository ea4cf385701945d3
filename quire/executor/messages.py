"""The messages between the executor and its ranks, in msgpack."""

from typing import Any

import msgspec

from quire.config.engine import ConfigError, EngineConfig
from quire.kv.specs import KVCacheSize
from quire.messages.changes import Change, TrainerOrder
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, StepCosts, TokenMasks
from quire.messages.transfers import Transfer
from quire.observability.logging import LogOptions
from quire.parallel.sizes import MeshSizes

BEAT_SECONDS = 1.0  # time between two heartbeats, in both directions


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """Sent in both directions while there are no other messages, to show that the sender is not stopped."""


# ---- from the executor to a rank


class Start(msgspec.Struct, array_like=True, tag=True):
    """The first message: which part of which model the rank must load.

    directory, max_model_len: arguments of Worker. meeting: where the ranks meet: a ZeroMQ address of the cluster's
    head, or "host:port" of a torch store. neighbours: the first rank of those that see the same GPUs as this one, and
    their number. machines: the machine number of each rank of the replica. replica: its number, if all replicas meet.
    generation: see `connect_store`.
    """

    config: EngineConfig
    directory: str
    max_model_len: int
    sizes: MeshSizes
    meeting: str
    num_threads: int
    log: LogOptions
    neighbours: tuple[int, int]
    machines: list[int]
    replica: int = 0
    generation: int = 0


class Submit(msgspec.Struct, array_like=True, tag=True):
    step: SchedulerOutput


class Sample(msgspec.Struct, array_like=True, tag=True):
    step_id: int
    masks: TokenMasks | None = None


class Take(msgspec.Struct, array_like=True, tag=True):
    """The tokens that the last pipeline stage has sampled in a step, for the other stages: see StageRunner.take."""

    step_id: int
    sampled_token_ids: list[list[int]]


class LoadAdapter(msgspec.Struct, array_like=True, tag=True):
    key: str
    path: str


class DropAdapter(msgspec.Struct, array_like=True, tag=True):
    key: str


Order = Start | Submit | Sample | Take | LoadAdapter | DropAdapter | Change | TrainerOrder | Transfer | Heartbeat


# ---- from a rank to the executor


class Hello(msgspec.Struct, array_like=True, tag=True):
    """The first message."""

    rank: int


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The rank has loaded its part of the model."""

    kv_cache: KVCacheSize
    step_costs: StepCosts = StepCosts()


class Result(msgspec.Struct, array_like=True, tag=True):
    """The result of a sampled step. Only the first rank of the last stage sends it, since all ranks of that stage have
    the same result."""

    output: ModelRunnerOutput


class Loaded(msgspec.Struct, array_like=True, tag=True):
    """The rank has carried out a keyed order while steps ran, or cannot, for the given reason. is_busy: whether it may
    succeed later."""

    key: str
    problem: str | None = None
    is_busy: bool = False


class Changed(msgspec.Struct, array_like=True, tag=True):
    """The rank has carried out a Change, or cannot, for the given reason; then it has changed nothing."""

    problem: str | None = None


class Busy(msgspec.Struct, array_like=True, tag=True):
    """The rank may be silent until it has carried out a Change."""


class Transferred(msgspec.Struct, array_like=True, tag=True):
    """A transfer has ended on this rank. failed: the indices of the blocks that it could not copy."""

    number: int
    failed: list[int]


class Broken(msgspec.Struct, array_like=True, tag=True):
    """The last message of a rank that fails. by_user: whether a wrong option or model is the cause; `reason` names
    it."""

    reason: str
    by_user: bool = False


Reply = Hello | Ready | Result | Loaded | Busy | Changed | Transferred | Broken | Heartbeat


# ---- between the executor and the agent of another machine, which forwards orders to its ranks and replies back


class Begin(msgspec.Struct, array_like=True, tag=True):
    """Sent to an agent when it joins: the fields of Start that are the same on all machines."""

    max_model_len: int
    sizes: MeshSizes
    meeting: str
    log: LogOptions
    machines: list[int]
    replica: int = 0
    generation: int = 0


class ForRanks(msgspec.Struct, array_like=True, tag=True):
    """An encoded order for the agent's ranks from `first` up to `stop` - 1."""

    first: int
    stop: int
    order: bytes


class FromRank(msgspec.Struct, array_like=True, tag=True):
    rank: int
    reply: Reply


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The ranks of the agent cannot continue. by_user: see Broken."""

    reason: str
    by_user: bool = False


AgentReport = FromRank | Failed


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as msgpack. Raises ConfigError for an option whose value cannot be sent to another process."""
    return msgspec.msgpack.encode(message, enc_hook=as_data)


def as_data(value: Any) -> str:
    """Return a class (of logits processors) by name, as "package.module:Class"."""
    if not isinstance(value, type):
        raise ConfigError(f"{value!r} cannot be sent to the processes that share the model; give it as plain data")
    if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
        raise ConfigError(
            f"logits_processors: the processes that share the model cannot import {value.__qualname__}, which is "
            f"defined in {'the main program' if value.__module__ == '__main__' else 'a function'}; put it into a module"
        )
    return f"{value.__module__}:{value.__qualname__}"
