"""What a caller of LLM.generate gets: vLLM's RequestOutput and CompletionOutput."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """What a model says of a token at a place. rank: 1 is the likeliest. decoded_token: what it adds to the text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    cumulative_logprob, logprobs: if the request asked for logprobs; logprobs holds {token id: Logprob} for each token,
    itself first.

    finish_reason: "stop", "length", "repetition", "abort", "error", or None while it runs; stop_reason: the stop string
    or the stop token id that ended it, None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """When things happened to a request, in seconds, and how many tokens it has brought.

    arrival_time: of the wall clock. The others are times of time.monotonic(), 0 for what has not happened: when the
    request was queued, first scheduled, and brought its first and its latest token. first_token_latency: from arrival.
    num_generation_tokens: of all n completions.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """A prompt and its completions so far.

    num_cached_tokens: prompt tokens that the prefix cache answered. prompt_logprobs: if the request asked for them,
    None for the first token and {token id: Logprob} for each further one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = None
