"""The limits of a step, and the scheduler's statistics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from quire.messages.engine import EngineCoreRequest
from quire.scheduler.pace import Pace
from quire.scheduler.request import Request

# A pipeline step computes at least this many prompt tokens, and otherwise a share of the waiting ones. Each stage
# should get several steps, since consecutive steps should take about equally long.
LEAST_CHUNK = 32
SHARES_OF_A_STAGE = 4


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits of each step.

    depth: how many steps may be submitted but not retired. long_prefill_token_threshold: the most tokens of one request
    in a step; 0 for no limit other than max_num_batched_tokens. lookahead: the most drafts that a drafter on the device
    makes after a step. whole_prompts: whether each prompt is computed in one step, for models that pool all its tokens
    or with enable_chunked_prefill=False. stages: of a pipeline. With several, running requests are divided among the
    steps in flight so that no stage starves. pace: keeps steps short while requests are generating; None for no such
    limit. adaptive_threshold: see `chunk`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    depth: int = 1
    long_prefill_token_threshold: int = 0
    lookahead: int = 0
    whole_prompts: bool = False
    stages: int = 1
    pace: Pace | None = None
    adaptive_threshold: bool = False

    @property
    def most_in_flight(self) -> int:
        """The most tokens of one request that have slots but may not be computed yet."""
        return self.max_num_batched_tokens * self.depth + self.lookahead

    @property
    def longest_chunk(self) -> int:
        """The most tokens of one request in a step."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)

    def chunk(self, num_requests: int) -> int:
        """Return the most tokens of one request in a step with `num_requests` requests. With adaptive_threshold, it is
        an equal share of the step if that exceeds the threshold."""
        if not self.adaptive_threshold:
            return self.longest_chunk
        return max(self.longest_chunk, self.max_num_batched_tokens // max(num_requests, 1))

    def budget(self, running: Sequence[Request], waiting: Iterable[Request]) -> int:
        """Return the most tokens of the next step. Pipeline steps share the work equally, since a stage would otherwise
        wait for another with a longer step."""
        most = self.max_num_batched_tokens
        if self.pace is not None:
            most = self.pace.limit(most, running)
        if self.stages == 1 or self.whole_prompts:
            return most
        pending = 0
        shares = SHARES_OF_A_STAGE * self.stages
        for request in chain(running, waiting):
            pending += len(request.token_ids) - request.num_computed_tokens
            if pending >= most * shares:
                return most
        return min(most, -(-len(running) // self.stages) + max(LEAST_CHUNK, -(-pending // shares)))

    def check(self, source: EngineCoreRequest) -> None:
        """Raises ValueError for a request that can never run."""
        if (source.sampling_params is None) == (source.pooling_params is None):
            raise ValueError(f"request {source.request_id}: give either sampling_params or pooling_params")
        if not source.prompt_token_ids or len(source.prompt_token_ids) + source.max_tokens > self.max_model_len:
            raise ValueError(
                f"request {source.request_id}: a prompt of {len(source.prompt_token_ids)} tokens and max_tokens="
                f"{source.max_tokens} do not fit max_model_len={self.max_model_len}"
            )

    def validate(self) -> None:
        """Raises ValueError for limits that contradict each other."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request gets a token each step"
            )


@dataclass
class SchedulerStats:
    """Counters since the start."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache when their request was first admitted
    prefix_hits: int = 0  # tokens among them that were found
    computed_tokens: int = 0  # tokens of retired steps
    generated_tokens: int = 0
