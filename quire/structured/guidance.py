"""The default back end: llguidance, which computes masks while a text grows instead of compiling an automaton."""

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.structured.vocabulary import Vocabulary
from quire.system.limits import processors

MAX_CHOICES = 10_000
MAX_TEXT = 200_000  # characters of a regular expression or a grammar, and of all choices together

# The defaults allow masks that take seconds. The errors' long form shows the grammar.
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, verbose_errors=False)
_TRIAL_TOKENS = 16


class GuidanceMatcher:
    """The state of one sequence in a grammar of llguidance."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state

    def accept(self, token_id: int) -> bool:
        return self.state.consume_token(token_id)

    def forced(self) -> list[int]:
        return self.state.compute_ff_tokens()

    @property
    def is_finished(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str | None:
        return _first_line(self.state.get_error()) if self.state.is_error() else None


class GuidanceGrammar:
    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def matcher(self) -> GuidanceMatcher:
        """A copy also has the states of the lexer that the trial has visited."""
        return GuidanceMatcher(self._prototype.deep_copy())


class GuidanceBackend:
    def __init__(self, vocabulary: Vocabulary, disable_any_whitespace: bool = False) -> None:
        self._compact = disable_any_whitespace
        self._tokenizer = LLTokenizer(vocabulary, vocabulary.vocab_size, vocabulary.eos_token_ids)  # type: ignore[arg-type]
        self._executor = LLExecutor(processors())

    def compile(self, params: StructuredOutputsParams) -> GuidanceGrammar:
        matcher = LLMatcher(self._tokenizer, self._source(params), log_level=0, limits=_LIMITS)
        _try(matcher)
        return GuidanceGrammar(matcher)

    def fill(self, matchers: Sequence[GuidanceMatcher], bits: np.ndarray) -> None:
        count, words = bits.shape
        states = [(matcher.state, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(states, bits.ctypes.data, words * 4, count)

    def _source(self, params: StructuredOutputsParams) -> str:
        """The constraint in llguidance's own language. Raises ValueError."""
        if params.json is not None or params.json_object:
            schema = '{"type": "object"}' if params.json_object else params.json
            assert isinstance(schema, str)
            return self._schema(schema, params)
        if params.choice is not None:
            if len(params.choice) > MAX_CHOICES or sum(map(len, params.choice)) > MAX_TEXT:
                raise ValueError(f"choice: at most {MAX_CHOICES} texts of {MAX_TEXT} characters in all are supported")
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
        text = params.regex or params.grammar or params.structural_tag or ""
        if len(text) > MAX_TEXT:
            raise ValueError(f"the constraint has {len(text)} characters; at most {MAX_TEXT} are supported")
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.grammar is not None:
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(params.grammar))
            except Exception as error:  # the converter raises Exception itself
                raise ValueError(f"the grammar cannot be read: {error_text(error)}") from error
        raise ValueError("structural_tag is not supported by Quire yet")

    def _schema(self, schema: str, params: StructuredOutputsParams) -> str:
        compact = self._compact or params.disable_any_whitespace
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": False,
                "whitespace_pattern": params.whitespace_pattern,
                "item_separator": "," if compact else ", ",
                "key_separator": ":" if compact else ": ",
                "lenient": False,
                "coerce_one_of": False,
            },
        )


def _try(matcher: LLMatcher) -> None:
    """Walk through the grammar at random, and come back. Raises ValueError for a grammar that does not work.

    Some limits are noticed only when a mask is computed.
    """
    chance = np.random.default_rng(0)
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_error():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        matcher.consume_token(int(chance.choice(allowed)))
    reason = _first_line(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting() and (not reason or reason.startswith("NoExtension")):
        raise ValueError("no text matches the constraint")
    if matcher.is_error():
        raise ValueError(reason)
    matcher.reset()


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "")[:500]
