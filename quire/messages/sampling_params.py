"""SamplingParams: how a request wants its tokens drawn. vLLM's names, defaults, ranges and messages."""

from typing import Self

import msgspec

GREEDY_TEMPERATURE = 1e-5  # below this, sampling is arg-max

# vLLM's fields that Quire does not act on yet, with the value that asks for nothing.
_NOT_YET = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "truncate_prompt_tokens": None,
    "structured_outputs": None,
    "logits_processors": None,
    "extra_args": None,
}


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling parameters of a request. Raises ValueError for a value out of range, naming the field.

    n: completions to draw for the prompt; completion i uses seed + i.
    temperature: 0 is greedy. top_p, top_k (0 or -1: all), min_p: the usual truncations of the distribution.
    seed: given equal logits, equal seeds give equal tokens whatever else runs; None draws a fresh one.
    stop, stop_token_ids: end before a string, or at a token. ignore_eos: go on after end-of-sequence.
    max_tokens: None is "up to max_model_len". min_tokens: no stop before that many.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, str] | None = None
    logits_processors: list[str] | None = None
    extra_args: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name, nothing in _NOT_YET.items():
            if getattr(self, name) not in (nothing, [], {}):
                raise ValueError(f"{name} is not supported by Quire yet; leave it at {nothing!r}.")
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self._check_types()
        self._check_ranges()
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    def _check_types(self) -> None:
        integers, optional, numbers = (
            ("n", "top_k", "min_tokens"),
            ("max_tokens", "seed"),
            ("temperature", "top_p", "min_p"),
        )
        for name in (*integers, *optional, *numbers):
            value = getattr(self, name)
            kinds = (int, float) if name in numbers else int
            if isinstance(value, bool) or not (isinstance(value, kinds) or (value is None and name in optional)):
                kind = "a number" if name in numbers else "an integer"
                raise TypeError(f"{name} must be {kind}, got {type(value).__name__}.")
        if not all(isinstance(s, str) for s in self.stop_strings):
            raise TypeError("stop must be a string or a list of strings.")
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in self.stop_token_ids or ()):
            raise TypeError(f"stop_token_ids must contain only integers, got {self.stop_token_ids}.")

    def _check_ranges(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}.")
        if self.n > 1 and self.greedy:
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be non-negative and finite, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}.")
        if any(not s for s in self.stop_strings):
            raise ValueError("stop cannot contain an empty string.")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True.")

    def clone(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)
