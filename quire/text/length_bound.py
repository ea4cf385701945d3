"""A lower bound on a text's number of tokens, without tokenizing it: long texts are rejected in microseconds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer as Backend

from quire.text.partial_backend import BpeVocabulary, PartialBackend
from quire.text.token_bytes import BYTE_OF_CHARACTER

# Normal forms replace characters with shorter ones: NFC turns 7 bytes into 2 (iota, diaeresis, acute), NFKC 4 into 1.
_NORMAL_FORM_FACTOR = 4
_LONGEST_CHARACTER = 4  # bytes in UTF-8
# Steps that lose no text, unless they split it at a delimiter that they remove.
_HARMLESS = "Sequence Prepend ByteLevel Metaspace Digits UnicodeScripts Split Punctuation".split()


class LengthBound(NamedTuple):
    """A text of n bytes becomes at least n / bytes_per_token tokens.

    counts_spaces: False if the tokenizer may drop white space, which is then not counted in n.
    """

    bytes_per_token: int
    counts_spaces: bool

    def fewest_tokens(self, text: str) -> int:
        counted = text if self.counts_spaces else "".join(text.split())
        size = len(counted) if counted.isascii() else len(counted.encode("utf-8", "surrogatepass"))
        return -(-size // self.bytes_per_token)

    @classmethod
    def of(cls, backend: Backend | PartialBackend) -> Self | None:
        """Return the bound of a tokenizer. None if it may drop text or encode a text of any length as one token, or if
        that is unknown."""
        steps = [step for component in (backend.normalizer, backend.pre_tokenizer) for step in _steps(component)]
        effect = _effect(steps)
        longest = _longest_token(backend, is_byte_level=any(step["type"] == "ByteLevel" for step in steps))
        if effect is None or longest is None or not _keeps_texts(backend.post_processor):
            return None
        factor, keeps_spaces = effect
        added = backend.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        return cls(longest * factor, keeps_spaces and not strips)


def _steps(component: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or post-processor, described as in tokenizer.json."""
    return [] if component is None else _parts(json.loads(component.__getstate__()))


def _keeps_texts(post_processor: Any) -> bool:
    """False if a template of special tokens omits the text."""
    templates = [step["single"] for step in _steps(post_processor) if step["type"] == "TemplateProcessing"]
    return all(any("Sequence" in piece for piece in template) for template in templates)


def _parts(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Yield the component and, if it is a sequence, its parts."""
    parts = state.get("normalizers") or state.get("pretokenizers") or state.get("processors") or []
    return [state, *(step for part in parts for step in _parts(part))]


def _effect(steps: Iterable[Mapping[str, Any]]) -> tuple[int, bool] | None:
    """Return (the factor by which the number of bytes can shrink, whether white space is preserved). None if text can
    be lost, or for an unknown step."""
    factor = 1
    keeps_spaces = True
    for step in steps:
        kind = step["type"]
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            factor *= _NORMAL_FORM_FACTOR
        elif kind == "Replace":
            pattern = step["pattern"].get("String")
            content = step["content"]
            if not pattern or not content:
                return None
            factor *= max(1, -(-len(pattern.encode()) // len(content.encode())))
        elif kind in ("Strip", "Whitespace", "WhitespaceSplit"):
            keeps_spaces = False
        elif kind not in _HARMLESS or step.get("behavior") == "Removed":
            return None
    return factor, keeps_spaces


class _Whole:
    """The vocabulary of the library's tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._tokens: dict[str, int] = backend.get_vocab(with_added_tokens=False)

    def has_all(self, texts: Sequence[str]) -> bool:
        return all(text in self._tokens for text in texts)

    def longest(self, in_characters: bool) -> int:
        return max((len(token) if in_characters else len(token.encode()) for token in self._tokens), default=1)


def _vocabulary_of(backend: Backend | PartialBackend) -> _Whole | BpeVocabulary:
    return backend.vocabulary if isinstance(backend, PartialBackend) else _Whole(backend)


def _longest_token(backend: Backend | PartialBackend, is_byte_level: bool) -> int | None:
    """Return the length of the longest token in bytes. None if some text has no tokens: the model then drops it or
    merges it into one unknown token."""
    model = backend.model
    vocab = _vocabulary_of(backend)
    has_all_bytes = vocab.has_all([f"<0x{byte:02X}>" for byte in range(256)])
    if type(model).__name__ == "BPE":
        affixes = bool(model.continuing_subword_prefix or model.end_of_word_suffix)
        single_unknowns = model.unk_token is not None and vocab.has_all([model.unk_token]) and not model.fuse_unk
        complete = (model.byte_fallback and has_all_bytes) or single_unknowns
        complete = complete or (is_byte_level and vocab.has_all([*BYTE_OF_CHARACTER]))
        if affixes or not complete:
            return None
    elif type(model).__name__ == "Unigram":
        if not (has_all_bytes and json.loads(model.__getstate__()).get("byte_fallback")):
            return None
    else:
        return None
    # In GPT-2's alphabet, each character of a token represents one byte.
    longest = vocab.longest(in_characters=is_byte_level)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    if (normalizer := backend.normalizer) is not None:
        added += [normalizer.normalize_str(content) for content in added]
    return max(longest, _LONGEST_CHARACTER, *(len(content.encode()) for content in added), 1)
