"""SamplingParams: how a request's tokens are sampled, with vLLM's names, defaults, ranges and messages."""

import math
from enum import Enum
from typing import Any, Self

import msgspec

from quire.messages.structured_outputs import StructuredOutputsParams

MAX_N = 16_384  # completions per prompt, vLLM's limit
GREEDY_TEMPERATURE = 1e-5  # below this, sampling is arg-max
MAX_LOGPROB_TOKEN_IDS = 128  # token ids whose logprobs one request may ask for, as in vLLM
MAX_PATTERN_SIZE = 1000  # tokens; the scheduler compares up to this many for each new token

_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = """max_tokens seed logprobs prompt_logprobs truncate_prompt_tokens stream_interval
    thinking_token_budget""".split()
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FLAGS = """ignore_eos detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output""".split()


class RequestOutputKind(Enum):
    """What a stream yields: the whole output so far, its part since the last time, or only the finished output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """When repeated output ends a request. Raises ValueError for values that contradict each other.

    A request ends when its output ends with min_count equal patterns in a row, each of min_pattern_size (0 means 1) to
    max_pattern_size tokens. max_pattern_size=0 disables the detection.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise ValueError(
                "repetition_detection: max_pattern_size and min_pattern_size must be at least 0 and at "
                f"most {MAX_PATTERN_SIZE}, with min_pattern_size <= max_pattern_size, got "
                f"{self.max_pattern_size} and {self.min_pattern_size}."
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"repetition_detection: min_count must be at least 2, got {self.min_count}.")


_STRUCTS: dict[str, type] = {
    "repetition_detection": RepetitionDetectionParams,
    "structured_outputs": StructuredOutputsParams,
}


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling parameters of a request. Raises ValueError or TypeError for a wrong value, naming the field.

    n: completions to draw for the prompt; completion i uses seed + i.
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logit of each token in the output, once or as
        often as the token occurs. repetition_penalty: for each token in prompt or output, divides its logit if that is
        positive and multiplies it if that is negative.
    temperature: 0 is greedy. top_p, top_k (0 or -1: all), min_p: the usual truncations of the distribution.
    seed: given equal logits, equal seeds give equal tokens regardless of other requests; None or -1 draws a new seed.
    stop, stop_token_ids: end before a string, or at a token. ignore_eos: continue after end-of-sequence.
    max_tokens: None means up to max_model_len. min_tokens: do not stop before this many tokens.
    logprobs, prompt_logprobs: return log-probabilities of this many of the likeliest tokens at each place (-1: of all),
        and of the text's own token. A request with prompt_logprobs does not read the prefix cache.
    logprob_token_ids: return log-probabilities of these tokens at each place of the output, instead of the likeliest,
        and of the output's own token. logprobs must then be None or the number of these token ids.
    detokenize: False gives token ids and no text. skip_special_tokens, spaces_between_special_tokens,
        include_stop_str_in_output: what the text contains.
    output_kind: what LLM.stream yields; LLM.generate always returns finished outputs. stream_interval: tokens between
        two outputs of a stream; the first and the last output are sent at once. The maximum of this value and the
        engine's stream_interval is used.
    repetition_detection: RepetitionDetectionParams, or a dict of its fields. A request that it ends has the finish
        reason "repetition".
    logit_bias: {token id: number that is added to its logit}. allowed_token_ids: sample only these tokens. bad_words:
    do
        not draw the token that would complete one of these words.
    truncate_prompt_tokens: shorten the prompt to this many tokens; -1 shortens it so that max_tokens fit after it.
        truncation_side: "left" (or None) removes tokens from the beginning, "right" from the end.
    skip_reading_prefix_cache: compute the whole prompt even if a prefix is cached.
    kv_compression: False keeps the whole KV cache of the prompt, {"ratio": 2} compresses it by a different ratio than
        the engine's, which must have kv_compression.
    structured_outputs: StructuredOutputsParams, or a dict of its fields: a constraint on the text after the model's
        thinking. thinking_token_budget: end the thinking after this many tokens; None or -1 for no limit.
    logits_processors: functions (output ids, logits) or (prompt ids, output ids, logits) -> logits, where logits are
        [vocab]; only where the model runs in the caller's process. extra_args: arguments for logits processor plugins.
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
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    skip_reading_prefix_cache: bool | None = None
    kv_compression: bool | dict[str, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    logits_processors: list[Any] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = [] if self.bad_words is None else self.bad_words
        self.seed = None if self.seed == -1 else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if isinstance(self.repetition_detection, dict):
            self.repetition_detection = msgspec.convert(self.repetition_detection, RepetitionDetectionParams)
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.create(self.structured_outputs)
        self._check_types()
        self._check_ranges()
        if self.greedy:
            self.top_p = 1.0
            self.top_k = 0
            self.min_p = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    @property
    def num_logprobs(self) -> int | None:
        """Return how many logprobs are returned at each place of the output, in addition to the output's own token."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def reads_prefix_cache(self) -> bool:
        return self.prompt_logprobs is None and not self.skip_reading_prefix_cache

    def _check_types(self) -> None:
        self._check_numbers()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.")
        self._check_texts()
        for name, kind in _STRUCTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind | None):
                raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__}.")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if not all(isinstance(v, int) and not isinstance(v, bool) for v in getattr(self, name) or ()):
                raise TypeError(f"{name} must contain only integers, got {getattr(self, name)}.")
        self._check_compression()
        self._check_dicts()
        for token_id in self.stop_token_ids or ():
            _check_size("stop_token_ids", token_id)
        if not all(callable(processor) for processor in self.logits_processors or ()):
            raise TypeError("logits_processors must contain only functions; plugins are given to the engine.")

    def _check_numbers(self) -> None:
        for name in (*_INTEGERS, *_OPTIONAL_INTEGERS, *_NUMBERS):
            value = getattr(self, name)
            kinds = (int, float) if name in _NUMBERS else int
            if value is None and name in _OPTIONAL_INTEGERS:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "a number" if name in _NUMBERS else "an integer"
                raise TypeError(f"{name} must be {kind}, got {type(value).__name__}.")
            _check_size(name, value)

    def _check_texts(self) -> None:
        if not all(isinstance(s, str) for s in self.stop_strings):
            raise TypeError(f"stop must be a string or a list of strings, got {self.stop}.")
        if isinstance(self.bad_words, str) or not all(isinstance(word, str) for word in self.bad_words or ()):
            raise TypeError(f"bad_words must be a list of strings, got {self.bad_words!r}.")

    def _check_compression(self) -> None:
        compression = self.kv_compression
        has_ratio = isinstance(compression, dict) and set(compression) == {"ratio"}
        if not has_ratio and not isinstance(compression, bool | None):
            raise TypeError(f'kv_compression must be True, False or {{"ratio": number}}, got {compression!r}.')
        ratio = compression["ratio"] if isinstance(compression, dict) else 1
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio <= 1024:
            raise ValueError(f"kv_compression: ratio must be a number from 1 to 1024, got {ratio!r}.")

    def _check_dicts(self) -> None:
        for name in ("logit_bias", "extra_args"):
            if not isinstance(getattr(self, name), dict | None):
                raise TypeError(f"{name} must be a dict, got {type(getattr(self, name)).__name__}.")
        for token_id, bias in (self.logit_bias or {}).items():
            if not isinstance(token_id, int) or not isinstance(bias, int | float):
                raise TypeError(f"logit_bias must map integer token ids to numbers, got {token_id!r}: {bias!r}.")
            _check_size("logit_bias", bias)

    def _check_ranges(self) -> None:
        _check(self.n >= 1, "n must be at least 1", self.n)
        _check(self.n <= MAX_N, f"n must be at most {MAX_N}", self.n)
        _check(self.n == 1 or not self.greedy, "n must be 1 when using greedy sampling", self.n)
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty must be in [-2, 2]", self.presence_penalty)
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty must be in [-2, 2]", self.frequency_penalty)
        repetition = self.repetition_penalty
        _check(math.isfinite(repetition), "repetition_penalty must be a finite number", repetition)
        _check(repetition > 0.0, "repetition_penalty must be greater than zero", repetition)
        _check(0.0 <= self.temperature < math.inf, "temperature must be non-negative and finite", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p must be in (0, 1]", self.top_p)
        _check(self.top_k >= -1, "top_k must be 0 (disable), or at least 1", self.top_k)
        _check(0.0 <= self.min_p <= 1.0, "min_p must be in [0, 1]", self.min_p)
        limit = math.inf if self.max_tokens is None else self.max_tokens
        _check(limit >= 1, "max_tokens must be at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens must be greater than or equal to 0", self.min_tokens)
        _check(
            self.min_tokens <= limit,
            f"min_tokens must be less than or equal to max_tokens={self.max_tokens}",
            self.min_tokens,
        )
        _check((self.logprobs or 0) >= -1, "logprobs must be non-negative or -1", self.logprobs)
        _check((self.prompt_logprobs or 0) >= -1, "prompt_logprobs must be non-negative or -1", self.prompt_logprobs)
        if self.logprob_token_ids is not None:
            count = len(self.logprob_token_ids)
            rule = f"logprob_token_ids must hold 1 to {MAX_LOGPROB_TOKEN_IDS} token ids"
            _check(1 <= count <= MAX_LOGPROB_TOKEN_IDS, rule, count)
            _check(
                self.logprobs in (None, count),
                f"logprobs must equal len(logprob_token_ids)={count} when both are set",
                self.logprobs,
            )
        interval = self.stream_interval
        _check(interval is None or interval >= 1, "stream_interval must be at least 1", interval)
        _check(
            (self.thinking_token_budget or 0) >= 0,
            "thinking_token_budget must be at least -1",
            self.thinking_token_budget,
        )
        keep = self.truncate_prompt_tokens
        _check(keep is None or keep == -1 or keep >= 1, "truncate_prompt_tokens must be -1 or at least 1", keep)
        side = self.truncation_side
        _check(side in (None, "left", "right"), "truncation_side must be 'left' or 'right'", repr(side))
        for token_id, bias in (self.logit_bias or {}).items():
            _check(not math.isnan(bias), f"logit_bias of token {token_id} must be a number", bias)
        if any(not s for s in self.stop_strings):
            raise ValueError("stop cannot contain an empty string.")
        if self.stop_strings and not self.detokenize:
            message = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            raise ValueError(message)
        if any(not word for word in self.bad_words or ()):
            raise ValueError(f"bad_words cannot contain an empty string. Got bad_words={self.bad_words}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is not None and empty!")

    def clone(self, **changes: object) -> Self:
        return msgspec.structs.replace(self, **changes)


def _check_size(name: str, value: float) -> None:
    """Raises ValueError for an integer of more than 64 bits: neither numpy nor msgpack can hold it."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, got {value if value.bit_length() < 100 else 'a larger number'}.")


def _check(valid: bool, rule: str, value: object) -> None:
    if not valid:
        raise ValueError(f"{rule}, got {value}.")


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of LLM.beam_search. Raises ValueError for a value out of range.

    beam_width: number of beams that are kept, and of sequences that are returned. max_tokens: of the output.
    temperature: above 0, a beam is also continued by a token drawn at that temperature. length_penalty: the score of a
    sequence is log-probability / length ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check(self.beam_width >= 1, "beam_width must be at least 1", self.beam_width)
        _check(self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens)
        _check(math.isfinite(self.length_penalty), "length_penalty must be a finite number", self.length_penalty)
