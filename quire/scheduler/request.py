"""The scheduler's view of a request: counters of positions, never of KV slots."""

import sys
from dataclasses import dataclass, field
from enum import Enum, auto

from quire.kv.manager import RequestBlocks
from quire.messages.engine import EngineCoreRequest
from quire.messages.step import AdapterPlace, NewRequest
from quire.scheduler.repetition import RepetitionDetector
from quire.structured.constraint import Constraint


class Status(Enum):
    GATED = auto()  # waits at a gate, outside the queue
    WAITING = auto()  # in the queue
    RUNNING = auto()  # has a row
    PREEMPTED = auto()  # leaves its row; returns to the queue when nothing holds its blocks
    FINISHED = auto()  # releases its row and blocks when nothing holds them


@dataclass(slots=True)
class Drafts:
    """Draft tokens for a request's next step, if nothing is in flight. Written by Speculation."""

    on_host: list[int] = field(default_factory=list)
    num_on_device: int = 0  # drafts that exist only on the device, after the tokens known or in flight


@dataclass(slots=True)
class NextCompression:
    """When a request's cache is compressed next. Written by Compression."""

    at: int = sys.maxsize  # number of computed tokens
    num_kept_blocks: int = 0  # full blocks kept then, or at the last compression; 0 if never compressed


@dataclass(slots=True)
class ConstrainedOutput:
    """The output of a request with a constraint. Written by ConstrainedRequests."""

    constraint: Constraint
    num_reported_tokens: int  # of the request's tokens
    takes_ahead: bool  # whether the tokens that the constraint forces are taken without being sampled
    ahead: list[Constraint] = field(default_factory=list)  # the constraint after each draft


NO_DRAFTS = Drafts()
NO_COMPRESSION = NextCompression()


class Request:
    """One sequence. Its fields are written by the scheduler, apart from those of the objects in the last group.

        token_ids     |---- prompt ----|---- sampled ----|
        in flight                                        |- num_in_flight_samples: submitted, not known yet
        drafts                                           |- drafts: guesses for the next step, if nothing is in flight
        computed      |--------------- num_computed_tokens ---|   submitted steps included
        retired       |------- num_retired_tokens ------|         retired steps only

    Steps hand out tokens until num_computed_tokens has caught up with the tokens that are known or in flight.
    """

    __slots__ = """block_hashes blocks cache_salt compression constrained drafts extra_keys holds is_limited key
        max_total_tokens min_total_tokens num_cached_tokens num_computed_tokens num_in_flight_samples num_preemptions
        num_prompt_tokens num_retired_tokens repetition request_id row source status stop_token_ids
        token_ids""".split()

    def __init__(self, source: EngineCoreRequest, key: tuple[int, float, int], extra_keys: dict[int, bytes]) -> None:
        self.source = source
        self.request_id = source.request_id
        self.key = key  # the order of service: (priority, arrival time, arrival number)
        self.status = Status.WAITING
        self.row = -1
        self.token_ids = [*source.prompt_token_ids, *source.output_token_ids]
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.cache_salt = source.cache_salt
        self.max_total_tokens = self.num_prompt_tokens + source.max_tokens
        sampling = source.sampling_params
        self.min_total_tokens = self.num_prompt_tokens + (0 if sampling is None else sampling.min_tokens)
        eos = [] if source.eos_token_id is None else [source.eos_token_id]
        self.stop_token_ids = frozenset([*eos, *source.stop_token_ids])
        detection = None if sampling is None else sampling.repetition_detection
        self.repetition = None if detection is None else RepetitionDetector(detection, source.output_token_ids)
        self.num_computed_tokens = 0
        self.num_retired_tokens = 0
        self.num_in_flight_samples = 0  # the most tokens that submitted steps may sample: one, and one for each draft
        self.holds = 0  # number of submitted steps that name it; its row and blocks stay until this is 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.is_limited = False  # whether media or compression limit the tokens of a step
        # Written by the KV cache manager.
        self.extra_keys = extra_keys
        self.block_hashes: list[bytes] = []
        self.blocks = RequestBlocks()
        # Each is replaced and written by one part of the scheduler, when the request enters it.
        self.drafts = NO_DRAFTS
        self.compression = NO_COMPRESSION
        self.constrained: ConstrainedOutput | None = None  # set when the request has passed the gates

    @property
    def is_compressed(self) -> bool:
        """Whether its cache is ever compressed."""
        return self.compression.num_kept_blocks > 0

    def waive_minimum(self) -> None:
        """Let the next token end the output, however short it is."""
        self.min_total_tokens = 0

    def admitted(self, adapter: AdapterPlace | None) -> NewRequest:
        """Return the worker's data of a request that has just been assigned its row and cached blocks."""
        source = self.source
        return NewRequest(
            self.request_id,
            self.row,
            list(self.token_ids),
            self.num_prompt_tokens,
            self.num_computed_tokens,
            source.sampling_params,
            source.seed,
            sorted(self.stop_token_ids) if self.min_total_tokens > self.num_prompt_tokens else [],
            source.bad_words,
            source.pooling_params,
            adapter,
            [item.place for item in source.media],
            source.rotary_positions,
        )
