"""Between the client side (processor, output processor) and the engine core."""

from enum import StrEnum

import msgspec

from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import Logprobs


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client went away
    REPETITION = "repetition"  # the output repeats itself, and the request asked to end then
    ERROR = "error"  # this request could not be run; stop_reason says why


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated, tokenized request. Lengths, ranges and token ids were checked by the processor.

    It has either sampling_params or pooling_params. seed: the resolved seed of this one sequence (n > 1 is fanned out
    before). arrival_time: seconds, orders the queue. max_tokens: resolved, so that prompt and output fit into
    max_model_len; 0 for a request that pools. eos_token_id: None to ignore it. output_token_ids: what the request
    generated in a core that was lost; generation goes on behind them.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None
    seed: int
    max_tokens: int
    eos_token_id: int | None = None
    stop_token_ids: list[int] = []
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    bad_words: list[list[int]] = []  # token ids of each way to write one
    output_token_ids: list[int] = []
    pooling_params: PoolingParams | None = None

    @property
    def reads_prefix_cache(self) -> bool:
        params = self.sampling_params or self.pooling_params
        return params is not None and params.reads_prefix_cache


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token, or what went wrong
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None  # of new_token_ids, at least
    prompt_logprobs: Logprobs | None = None  # once: of all prompt tokens but the first
    scheduled_at: float = 0.0  # time.monotonic() when it was first given a row; in its first output
    num_preemptions: int = 0  # how often it has lost its blocks to another request so far


# ---- between processes: what a client says to a core, and what it hears


class AddRequests(msgspec.Struct, array_like=True, tag=True):
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, array_like=True, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=True):
    pass


class Shutdown(msgspec.Struct, array_like=True, tag=True):
    """End now; what is unfinished ends without a word."""


CoreOrder = AddRequests | AbortRequests | ResetPrefixCache | Shutdown


class CoreStats(msgspec.Struct, array_like=True):
    """A core's state after a step, and what it counted since it started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks that requests hold
    preemptions: int = 0
    prefix_queries: int = 0  # tokens that were looked up
    prefix_hits: int = 0  # of those, tokens that needed no computing
    computed_tokens: int = 0  # by the steps whose results are known, of prompts and of outputs


class CoreReady(msgspec.Struct, array_like=True, tag=True):
    num_blocks: int
    kv_cache_tokens: int
    max_model_len: int


class StepOutputs(msgspec.Struct, array_like=True, tag=True):
    outputs: list[EngineCoreOutput]
    stats: CoreStats


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """The core's process runs."""


class CoreDied(msgspec.Struct, array_like=True, tag=True):
    """Its last words, or what its client says of it. by_user: an option was wrong, so that starting it again is of no
    use. silent: it may be there still."""

    reason: str
    by_user: bool = False
    silent: bool = False


CoreReport = CoreReady | StepOutputs | Heartbeat | CoreDied
