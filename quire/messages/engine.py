"""Messages between the client side (processor, output processor) and the engine cores."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Self

import msgspec

from quire.messages.changes import Command, Look, TrainerOrder
from quire.messages.lora import Adapter
from quire.messages.media import MediaItem
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import Logprobs, Pooled
from quire.messages.structured_outputs import ThinkingLimits
from quire.messages.transfers import TransferParams


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client disconnected
    REPETITION = "repetition"  # the output repeated itself, and the request has repetition_detection
    ERROR = "error"  # the request could not be run; stop_reason has the reason
    BAD_REQUEST = "bad_request"  # the request itself is invalid, for example its grammar; stop_reason has the reason
    OVERLOADED = "overloaded"  # other requests used up the time or memory; stop_reason has the reason


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated, tokenized request. The processor has checked lengths, ranges and token ids.

    It has either sampling_params or pooling_params. seed: the resolved seed of this one sequence (a request with n > 1
    becomes n of these). arrival_time: in seconds; orders the queue. max_tokens: resolved, so that prompt and output fit
    into max_model_len; 0 for a pooling request. eos_token_id: None to ignore end-of-sequence. output_token_ids: tokens
    that the request generated in a core that was lost; generation continues after them. thinking: where the output's
    thinking ends; None if the request needs no such limits. media: in prompt order. rotary_positions: see NewRequest.
    trial: for a request that may have caused the loss of a core, the number of tokens that it must output before other
    requests start; 0 for other requests.
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
    bad_words: list[list[int]] = []  # token ids of each form of each bad word
    output_token_ids: list[int] = []
    pooling_params: PoolingParams | None = None
    thinking: ThinkingLimits | None = None
    adapter: Adapter | None = None
    transfer: TransferParams | None = None
    media: list[MediaItem] = []
    rotary_positions: bytes = b""
    trial: int = 0

    @property
    def crossed(self) -> int:
        """Return how many encoder tokens the request reads by cross-attention."""
        return sum(item.place.crossed for item in self.media)

    @property
    def reads_prefix_cache(self) -> bool:
        params = self.sampling_params or self.pooling_params
        return params is not None and params.reads_prefix_cache


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token, or the error's message
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None  # of new_token_ids, and possibly of sampled tokens cut off after them
    prompt_logprobs: Logprobs | None = None  # of all prompt tokens except the first; sent once
    scheduled_at: float = 0.0  # time.monotonic() when the request first got a row; set in its first output
    num_preemptions: int = 0  # how often the request has been preempted so far
    num_draft_tokens: int = 0  # drafts of the request that the step verified
    num_accepted_tokens: int = 0  # of these, those that the model accepted
    pooled: Pooled | None = None  # the result of a pooling request


# ---- between processes: a client's orders to a core, and the replies


class Connect(msgspec.Struct, array_like=True, tag=True):
    """The first order of a client on a connection. every_step: report all steps to the client, not only steps with
    outputs for it. client: its name; its requests on an earlier connection are dropped."""

    every_step: bool = True
    client: str = ""


class AddRequests(msgspec.Struct, array_like=True, tag=True):
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, array_like=True, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=True):
    """external: also clear the tiers outside the pool."""

    external: bool = False


class CarryOut(msgspec.Struct, array_like=True, tag=True):
    """Carry out a command. number: chosen by the client, repeated in the reply."""

    number: int
    command: Command | TrainerOrder | Look


class Shutdown(msgspec.Struct, array_like=True, tag=True):
    """End now. Unfinished requests get no further output."""


CoreOrder = Connect | AddRequests | AbortRequests | ResetPrefixCache | CarryOut | Shutdown


class SpeculationStats(msgspec.Struct, array_like=True):
    """A core's counts of speculation since it started."""

    drafts: int = 0  # how often the drafts of a request were verified
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = []  # by position: how often the first, second, ... draft was accepted

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.drafts, self.draft_tokens, self.accepted_tokens


class CoreStats(msgspec.Struct, array_like=True):
    """A core's state after a step, and its counts since it started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks that requests hold, 0 to 1
    preemptions: int = 0
    prefix_queries: int = 0  # tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # of these, tokens that were found and not computed
    computed_tokens: int = 0  # prompt and output tokens computed by the steps whose results are known
    generated_tokens: int = 0  # tokens generated by these steps
    is_paused: bool = False
    is_sleeping: bool = False
    external_queries: int = 0  # tokens that were looked up in tiers outside the pool
    external_hits: int = 0  # of these, tokens that were loaded
    runs_reference: bool = False  # whether steps run PyTorch operations on a CPU because kernels are not compiled
    speculation: SpeculationStats | None = None

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        """Return the combined stats of several cores."""
        if len(parts) == 1:
            return parts[0]
        found = [part.speculation for part in parts if part.speculation is not None]
        at = [sum(counts) for counts in zip_longest(*(s.accepted_at for s in found), fillvalue=0)]
        total = cls(*(sum(counts) for counts in zip(*(msgspec.structs.astuple(p)[:-1] for p in parts), strict=True)))
        total.kv_cache_usage /= len(parts)
        if found:
            drafts, drafted, accepted = map(sum, zip(*(s.counts for s in found), strict=True))
            total.speculation = SpeculationStats(drafts, drafted, accepted, at)
        return total


class CarriedOut(msgspec.Struct, array_like=True):
    """A command has been carried out, or cannot be, for the given reason. answer: the result of a query."""

    number: int
    problem: str | None = None
    answer: bytes = b""


class StepOutputs(msgspec.Struct, array_like=True):
    """A core's report to a client after a step. num_received: requests received from this client so far.
    sent_at: time.monotonic() on the core's machine. carried_out: results of the client's commands."""

    outputs: list[EngineCoreOutput]
    stats: CoreStats
    num_received: int = 0
    sent_at: float = 0.0
    carried_out: list[CarriedOut] = []


# ---- between processes: the reports of a core to the process that started it


class RendezvousPlace(msgspec.Struct, frozen=True, array_like=True):
    """The rendezvous of ranks whose replicas share experts. replica: this replica's number. address, generation: of a
    store, see `connect_store`. host: this machine's address for the others. key: authorizes waking the cores. is_head:
    whether the store belongs to a cluster's head; the key is then the cluster's secret."""

    replica: int
    address: str
    host: str
    key: bytes = b""
    generation: int = 0
    is_head: bool = False

    @property
    def secret(self) -> bytes:
        return self.key if self.is_head else b""


class CoreReady(msgspec.Struct, array_like=True, tag=True):
    """The core is ready. address: where it accepts orders from clients on other machines, if it does. runs_reference:
    see CoreStats."""

    num_blocks: int
    kv_cache_tokens: int
    max_model_len: int
    address: str = ""
    runs_reference: bool = False


class FirstOutput(msgspec.Struct, array_like=True, tag=True):
    """The core has run a request, so it is worth restarting if it fails later."""


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """Sent regularly while the core's process runs.

    waited: seconds for which the core has had work without completing a step. num_tokens, encodes: the maximum number
    of tokens of the steps in flight, and whether one encodes media. longest, most_tokens: the maximum seconds and
    tokens of completed steps. has_run, has_encoded: whether any step has completed, and any that encoded media.
    """

    waited: float = 0.0
    num_tokens: int = 0
    encodes: bool = False
    longest: float = 0.0
    most_tokens: int = 0
    has_run: bool = False
    has_encoded: bool = False


class Busy(msgspec.Struct, array_like=True, tag=True):
    """From now on, the core may be silent for this long."""

    seconds: float


class CoreDied(msgspec.Struct, array_like=True, tag=True):
    """Why a core was lost: its own last report, or the parent's diagnosis.

    by_user: an option was wrong, so a restart would fail too. silent: the process may still exist. culprit: the id
    of the request that was on trial.
    """

    reason: str
    by_user: bool = False
    silent: bool = False
    culprit: str | None = None


CoreReport = CoreReady | FirstOutput | Heartbeat | Busy | CoreDied


# ---- notifications to a client about the cores


class CoreUp(msgspec.Struct, array_like=True, tag=True):
    """A core accepts orders at a ZeroMQ address. rank: its number. secret: the cluster's secret, if the core is on
    another machine. generation: the generation of replicas that share experts, see RendezvousPlace."""

    rank: int
    address: str
    size: CoreReady
    secret: bytes = b""
    generation: int = 0


class CoreLost(msgspec.Struct, array_like=True, tag=True):
    """A core was lost. given_up: it will not be restarted. generation: see CoreUp."""

    rank: int
    died: CoreDied
    given_up: bool
    generation: int = 0


CoreEvent = CoreUp | CoreLost


# ---- from the server's machine to other machines whose replicas share experts


class Begin(msgspec.Struct, array_like=True, tag=True):
    """Start the replicas of a generation, and end those of other generations."""

    generation: int
