"""The back end xgrammar, which compiles grammars to automata over bytes. Needs the extra xgrammar."""

import json
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.platform.limits import processors
from quire.structured.grammar import Backend, Matcher, TokenTable
from quire.structured.keywords import check_keywords
from quire.structured.references import Schema
from quire.structured.schema import rewritten

if TYPE_CHECKING:  # imports the tokenizers library
    from quire.structured.vocabulary import Vocabulary


class XgrammarMatcher:
    """The state of one sequence in a grammar of xgrammar."""

    error: str | None = None

    def __init__(self, state: Any, vocabulary: "Vocabulary | TokenTable") -> None:
        self.state = state
        self._vocabulary = vocabulary

    def accept(self, token_id: int) -> bool:
        return bool(self.state.accept_token(token_id))

    def forced(self) -> list[int]:
        """The last token is left out, since the tokenizer might join it with the text that follows."""
        try:
            text = self.state.find_jump_forward_string()
        except UnicodeDecodeError:  # it begins or ends within a character
            return []
        return self._vocabulary(text)[:-1] if text else []

    def fork(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self.state.fork(), self._vocabulary)

    @property
    def is_finished(self) -> bool:
        return bool(self.state.is_terminated())


class XgrammarBackend(Backend):
    def __init__(self, vocabulary: "Vocabulary | TokenTable", compact: bool = False, closed: bool = False) -> None:
        self._vocabulary = vocabulary
        self._compact = compact
        self._closed = closed
        if isinstance(vocabulary, TokenTable):
            _hide_torch()
        from xgrammar.compiler import GrammarCompiler
        from xgrammar.tokenizer_info import TokenizerInfo

        special = set(vocabulary.special_token_ids)
        tokens = [b"" if token_id in special else token for token_id, token in enumerate(vocabulary.tokens)]
        self._tokenizer = TokenizerInfo(
            tokens, vocab_size=vocabulary.vocab_size, stop_token_ids=vocabulary.eos_token_ids
        )
        self._compiler = GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)

    @cached_property
    def _batch(self) -> Any:
        from xgrammar.matcher import BatchGrammarMatcher

        return BatchGrammarMatcher(max_threads=processors())

    def source(self, params: StructuredOutputsParams) -> bytes:
        try:
            text: str = self._compile(params).serialize_json()
        except RuntimeError as error:
            raise ValueError(error_text(error)[:500]) from error
        return text.encode()

    def load(self, source: bytes) -> Matcher:
        """Load a compiled grammar. In a worker process, where the matchers are not imported, the result is unused."""
        from xgrammar.compiler import CompiledGrammar

        grammar = CompiledGrammar.deserialize_json(source.decode(), self._tokenizer)
        if isinstance(self._vocabulary, TokenTable):
            loaded: Any = grammar
            return loaded  # type: ignore[no-any-return]
        from xgrammar.matcher import GrammarMatcher

        state = GrammarMatcher(grammar, override_stop_tokens=self._vocabulary.eos_token_ids)
        return XgrammarMatcher(state, self._vocabulary)

    def fill(self, matchers: Sequence[XgrammarMatcher], bits: np.ndarray) -> None:
        self._batch.batch_fill_next_token_bitmask([matcher.state for matcher in matchers], bits)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        if params.whitespace_pattern is not None:
            raise ValueError("whitespace_pattern needs the back end guidance")
        if params.json_object:
            return self._schema({"type": "object"}, params, checked=False)
        if params.json is not None:
            return self._schema(json.loads(str(params.json)), params)
        if params.choice is not None:
            return self._compiler.compile_regex("|".join(f"({re.escape(text)})" for text in params.choice))
        if params.regex is not None:
            return self._compiler.compile_regex(params.regex)
        if params.grammar is not None:
            return self._compiler.compile_grammar(params.grammar)
        return self._compiler.compile_structural_tag(params.structural_tag or "")

    def _schema(self, schema: Schema, params: StructuredOutputsParams, checked: bool = True) -> Any:
        result = rewritten(schema, closed=self._closed or params.disable_additional_properties)
        if checked:
            check_keywords(result, "xgrammar")
        separators = (",", ":") if self._compact or params.disable_any_whitespace else (", ", ": ")
        return self._compiler.compile_json_schema(
            json.dumps(result), any_whitespace=False, separators=separators, strict_mode=False
        )


def _hide_torch() -> None:
    """Make xgrammar's compiler importable without torch and transformers, which it does not need.

    For worker processes. Importing the package itself would import both, so its modules are placed in an empty package.
    """
    spec = find_spec("xgrammar")
    if "xgrammar" in sys.modules or spec is None or spec.submodule_search_locations is None:
        return
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    transformers: Any = ModuleType("transformers")
    transformers.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast = type("Absent", (), {})
    absent: Any = dict.fromkeys(("torch", "sentencepiece", "tiktoken"))  # importing these raises ImportError
    sys.modules.update(absent | {"xgrammar": package, "transformers": transformers})
    import xgrammar.load_binding  # noqa: F401
