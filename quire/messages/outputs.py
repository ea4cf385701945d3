"""What a caller of LLM.generate gets: vLLM's RequestOutput and CompletionOutput."""

from dataclasses import dataclass, field


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    finish_reason: "stop", "length", "abort", "error", or None while it runs; stop_reason: the stop string or the stop
    token id that ended it, None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its completions so far. num_cached_tokens: prompt tokens that the prefix cache answered."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
