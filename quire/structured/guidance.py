"""The default back end: llguidance, which computes masks during generation instead of compiling an automaton."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from quire.messages.structured_outputs import StructuredOutputsParams
from quire.platform.limits import processors
from quire.structured.grammar import Backend, TokenTable
from quire.structured.open_values import narrowed
from quire.structured.references import Schema
from quire.structured.schema import rewritten
from quire.structured.structural_tag import as_lark, structural_tag

if TYPE_CHECKING:  # imports the tokenizers library; and worker processes, which fill no masks, do not need numpy
    import numpy as np

    from quire.structured.vocabulary import Vocabulary

MAX_CHOICES = 10_000
MAX_TEXT = 200_000  # characters of a regular expression or a grammar, and of all choices together

# The defaults allow masks that take seconds, and states of half a gigabyte. Long error messages show the grammar.
_BOUNDS: dict[str, Any] = {"step_lexer_fuel": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
_LIMITS = LLParserLimits(step_max_items=20_000, **_BOUNDS)
# An ambiguous grammar has rows of many items, which are compared pairwise: 2,000 items take 0.6 s per mask.
_FREE_LIMITS = LLParserLimits(step_max_items=20_000, max_items_in_row=500, **_BOUNDS)
_PLAIN, _FREE = b"p", b"f"  # the first byte of a source
_TRIAL_TOKENS = 16
_FEW = 16  # masks for which one thread is used; more threads would slow the forward down by more than they save


class GuidanceMatcher:
    """The state of one sequence in a grammar of llguidance."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state

    def accept(self, token_id: int) -> bool:
        return self.state.consume_token(token_id)

    def forced(self) -> list[int]:
        return self.state.compute_ff_tokens()

    def fork(self) -> "GuidanceMatcher":
        """The copy includes the visited states of the lexer, such as those of the trial run."""
        return GuidanceMatcher(self.state.deep_copy())

    @property
    def is_finished(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str | None:
        return _reason(self.state.get_error()) if self.state.is_error() else None


class GuidanceBackend(Backend):
    def __init__(self, vocabulary: "Vocabulary | TokenTable", compact: bool = False, closed: bool = False) -> None:
        self._vocabulary = vocabulary
        self._compact = compact
        self._closed = closed
        self._tokenizer = LLTokenizer(vocabulary, vocabulary.vocab_size, vocabulary.eos_token_ids)  # type: ignore[arg-type]

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        spelled = ((self._vocabulary.tokens[i].decode(errors="replace"), i) for i in self._vocabulary.special_token_ids)
        return {name: i for name, i in spelled if name}

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(processors())

    def source(self, params: StructuredOutputsParams) -> bytes:
        """Translate a constraint to llguidance's own language. A schema that matches no document once narrowed is used
        unchanged."""
        try:
            return self._tried(params, narrowed)
        except ValueError:
            if params.json is None and params.structural_tag is None:
                raise
            return self._tried(params, lambda schema: schema)

    def load(self, source: bytes) -> GuidanceMatcher:
        limits = _FREE_LIMITS if source[:1] == _FREE else _LIMITS
        matcher = LLMatcher(self._tokenizer, source[1:].decode(), log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        return GuidanceMatcher(matcher)

    def fill(self, matchers: Sequence[GuidanceMatcher], bits: "np.ndarray") -> None:
        count, words = bits.shape
        if count <= _FEW:
            for row, matcher in enumerate(matchers):
                matcher.state.unsafe_compute_mask_ptr(bits.ctypes.data + row * words * 4, words * 4)
            return
        states = [(matcher.state, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(states, bits.ctypes.data, words * 4, count)

    def _tried(self, params: StructuredOutputsParams, narrow: Callable[[dict[str, Any]], Schema]) -> bytes:
        source = self._source(params, narrow)
        _try(self.load(source).state)
        return source

    def _source(self, params: StructuredOutputsParams, narrow: Callable[[dict[str, Any]], Schema]) -> bytes:
        """Return the input of `load`: whether the grammar may be ambiguous, and the grammar."""

        def schema(source: Schema) -> dict[str, Any]:
            result = narrow(rewritten(source, closed=self._closed or params.disable_additional_properties))
            if isinstance(result, bool):
                raise ValueError("no document is valid for the schema")
            return {**result, "x-guidance": self._spelling(params)}

        if params.structural_tag is not None:
            _check_length(params.structural_tag)
            grammar, is_free = structural_tag(params.structural_tag, schema, self._special_tokens)
            return (_FREE if is_free else _PLAIN) + grammar.encode()
        if params.grammar is not None:
            _check_length(params.grammar)
            return _FREE + LLMatcher.grammar_from_lark(as_lark(params.grammar)).encode()
        return _PLAIN + self._plain(params, schema).encode()

    def _plain(self, params: StructuredOutputsParams, schema: Callable[[Schema], dict[str, Any]]) -> str:
        if params.json_object:
            return LLMatcher.grammar_from_json_schema(schema({"type": "object"}))
        if params.json is not None:
            return LLMatcher.grammar_from_json_schema(schema(json.loads(str(params.json))))
        if params.choice is not None:
            if len(params.choice) > MAX_CHOICES or sum(map(len, params.choice)) > MAX_TEXT:
                raise ValueError(f"choice: at most {MAX_CHOICES} texts of {MAX_TEXT} characters in all are supported")
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
        _check_length(params.regex or "")
        return LLMatcher.grammar_from_regex(params.regex or "")

    def _spelling(self, params: StructuredOutputsParams) -> dict[str, Any]:
        """llguidance's options for JSON. With fixed spaces, even a weak model's output terminates, and spaces can be
        forced."""
        compact = self._compact or params.disable_any_whitespace or params.whitespace_pattern is not None
        return {
            "whitespace_flexible": False,
            "whitespace_pattern": params.whitespace_pattern,
            "item_separator": "," if compact else ", ",
            "key_separator": ":" if compact else ": ",
        }


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ValueError(f"the constraint has {len(text)} characters; at most {MAX_TEXT} are supported")


def _bit(bits: int, number: int) -> int:
    """Return the position of the n-th set bit. Without numpy, see above."""
    place = 0
    size = bits.bit_length()
    while size > 1:
        half = size // 2
        low = bits & ((1 << half) - 1)
        if number < (count := low.bit_count()):
            bits = low
            size = half
        else:
            bits = bits >> half
            number = number - count
            place = place + half
            size = size - half
    return place


def _try(matcher: LLMatcher) -> None:
    """Walk through the grammar at random, and roll back. Raises ValueError for a grammar that does not work. Some
    limits are only detected when a mask is computed.
    """
    chance = Random(0)
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_error():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")  # a bit for each token
        if matcher.is_stopped():
            break
        matcher.consume_token(_bit(allowed, chance.randrange(allowed.bit_count())))
    reason = _reason(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting() and (not reason or reason.startswith("NoExtension")):
        raise ValueError("no text matches the constraint")
    if matcher.is_error():
        raise ValueError(reason)
    matcher.reset()


def _reason(message: str) -> str:
    """Return llguidance's message without its illustrations of the position and of its own state."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join([*lines[:1], *(line for line in lines[1:] if line.startswith("error:"))])[:500]
