"""A request as the scheduler sees it: counters of positions, never of KV slots."""

import sys
from enum import Enum, auto

from quire.kv.block_pool import Block
from quire.messages.engine import EngineCoreRequest
from quire.messages.step import AdapterPlace, NewRequest
from quire.scheduler.repetition import RepetitionDetector
from quire.structured.constraint import Constraint


class Status(Enum):
    GATED = auto()  # waits at a gate, outside the queue
    WAITING = auto()  # in the queue
    RUNNING = auto()  # has a row
    PREEMPTED = auto()  # leaves its row; returns to the queue when nothing holds its blocks
    FINISHED = auto()  # gives back its row and its blocks when nothing holds them


class Request:
    """One sequence.

        token_ids     |---- prompt ----|---- sampled ----|
        in flight                                        |- num_in_flight_samples: submitted, not known yet
        drafts                                           |- drafts: guesses for the next step, if nothing is in flight
        computed      |--------------- num_computed_tokens ---|   submitted steps included
        retired       |------- num_retired_tokens ------|         retired steps only

    Steps hand out tokens until num_computed_tokens has caught up with the tokens that are known or in flight.
    """

    __slots__ = """block_hashes block_tables cache_salt capacity compress_at constraint constraints_ahead drafts
        extra_keys holds is_limited key max_total_tokens min_total_tokens next_hash_at num_cached_tokens
        num_computed_tokens num_device_drafts num_hashed_blocks num_in_flight_samples num_kept_blocks
        num_preemptions num_prompt_tokens num_removed_tokens num_reported_tokens num_retired_tokens
        num_tokens_at_last_free repetition request_id row source status stop_token_ids takes_ahead
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
        # Whether the tokens that the constraint forces are taken without being sampled: not if they need logprobs.
        self.takes_ahead = sampling is not None and sampling.num_logprobs is None
        self.constraint: Constraint | None = None  # set when the request has passed the gates
        self.num_reported_tokens = len(self.token_ids)  # of a request with a constraint
        self.num_computed_tokens = 0
        self.num_retired_tokens = 0
        self.num_in_flight_samples = 0  # the most tokens that submitted steps may give: one, and one for each draft
        self.drafts: list[int] = []
        self.num_device_drafts = 0  # drafts that only the device knows, behind the tokens known or in flight
        self.constraints_ahead: list[Constraint] = []  # the constraint behind each draft
        self.holds = 0  # number of submitted steps that name it; its row and blocks stay until this is 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.compress_at = sys.maxsize  # number of computed tokens at which the cache is compressed next
        self.is_limited = False  # whether its media or its compression say which tokens a step may compute
        self.num_kept_blocks = 0  # full blocks that are kept then, or were kept last; 0 if it is never compressed
        # Owned by the KV cache manager.
        self.extra_keys = extra_keys
        self.block_tables: list[list[Block]] = []  # one for each KV group
        self.capacity = 0  # tokens that the block tables have slots for
        self.num_removed_tokens = 0  # tokens by whose blocks the compressed text is shorter, in whole blocks
        self.num_tokens_at_last_free = 0  # retired tokens when unneeded blocks were last given back
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.next_hash_at = 0  # number of computed tokens at which the next block is full

    def admitted(self, adapter: AdapterPlace | None) -> NewRequest:
        """What the worker must know of a request that has just got its row and its cached blocks."""
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
