"""The back end outlines-core, which compiles regular expressions to automata over tokens. Needs the extra outlines."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.structured.grammar import Backend, TokenTable
from quire.structured.keywords import check_keywords
from quire.structured.schema import rewritten

if TYPE_CHECKING:  # imports the tokenizers library
    from quire.structured.vocabulary import Vocabulary


class OutlinesMatcher:
    """The state of one sequence in an automaton of outlines-core."""

    error: str | None = None
    is_finished = False  # the automaton does not report whether a complete text may continue

    def __init__(self, index: outlines_core.Index, token_ids: Sequence[int] = ()) -> None:
        self._index = index
        self._token_ids = list(token_ids)
        self.state = outlines_core.Guide(index)
        for token_id in token_ids:
            self.state.advance(token_id, return_tokens=False)

    def accept(self, token_id: int) -> bool:
        if not self.state.accepts_tokens([token_id]):
            return False
        self.state.advance(token_id, return_tokens=False)
        self._token_ids.append(token_id)
        return True

    def forced(self) -> list[int]:
        return []

    def fork(self) -> "OutlinesMatcher":
        return OutlinesMatcher(self._index, self._token_ids)


class OutlinesBackend(Backend):
    def __init__(self, vocabulary: "Vocabulary | TokenTable", compact: bool = False, closed: bool = False) -> None:
        self._compact = compact
        self._closed = closed
        ids: dict[bytes, list[int]] = {}
        special = set(vocabulary.special_token_ids)
        for token_id, token in enumerate(vocabulary.tokens):
            if token and token_id not in special:
                ids.setdefault(token, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(vocabulary.eos_token_id, ids)

    def source(self, params: StructuredOutputsParams) -> bytes:
        pattern = self._pattern(params)
        try:
            index = outlines_core.Index(pattern, self._vocabulary)
        except Exception as error:  # the library raises plain Exceptions
            raise ValueError(error_text(error)[:500]) from error
        _, (data,) = index.__reduce__()
        return bytes(data)

    def load(self, source: bytes) -> OutlinesMatcher:
        return OutlinesMatcher(outlines_core.Index.from_binary(source))

    def fill(self, matchers: Sequence[OutlinesMatcher], bits: np.ndarray) -> None:
        bits[:] = 0
        for matcher, row in zip(matchers, bits, strict=True):
            matcher.state.write_mask_into(row.ctypes.data, row.size, row.itemsize)

    def _pattern(self, params: StructuredOutputsParams) -> str:
        if params.choice is not None:
            return "|".join(f"({re.escape(text)})" for text in params.choice)
        if params.regex is not None:
            return params.regex
        if params.json is None:
            raise ValueError("the back end outlines has json, regex and choice; other kinds need the back end guidance")
        schema = rewritten(json.loads(str(params.json)), closed=self._closed or params.disable_additional_properties)
        check_keywords(schema, "outlines")
        spaces = "" if self._compact or params.disable_any_whitespace else "[ ]?"
        try:
            pattern: str = build_regex_from_schema(
                json.dumps(schema), spaces if params.whitespace_pattern is None else params.whitespace_pattern
            )
        except Exception as error:
            raise ValueError(error_text(error)[:500]) from error
        return pattern
