"""The results of LLM.generate: vLLM's RequestOutput and CompletionOutput."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token at a place. rank: 1 is the likeliest. decoded_token: what it adds to the text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    cumulative_logprob, logprobs: None unless the request asked for logprobs. logprobs has {token id: Logprob} for each
    token of the completion; that token itself is first.

    finish_reason: "stop", "length", "repetition", "abort", "error", "bad_request", or None while it runs. stop_reason:
    the stop string or the stop token id that ended the completion, None for end-of-sequence; with "error" and
    "bad_request", the reason. A bad request is one that only the engine finds wrong, such as an impossible grammar.
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
    """The times of a request's events, in seconds, and the number of its tokens.

    arrival_time: by the wall clock. The other times are by time.monotonic(), and 0 for events that have not happened:
    when the request was queued, when it was first scheduled, and when its first and its latest token arrived.
    first_token_latency: from arrival to the first token. num_generation_tokens: of all n completions.
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

    num_cached_tokens: prompt tokens that were found in the prefix cache. prompt_logprobs: if the request asked for
    them, None for the first token and {token id: Logprob} for each later one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = None
