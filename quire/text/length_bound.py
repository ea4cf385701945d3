"""A lower bound of a text's number of tokens, without tokenizing it: long texts are refused in microseconds."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer as Backend

from quire.text.token_bytes import BYTE_OF_CHARACTER

# Normal forms replace characters with shorter ones: NFC turns 7 bytes into 2 (iota, diaeresis, acute), NFKC 4 into 1.
_NORMAL_FORM_FACTOR = 4
_LONGEST_CHARACTER = 4  # bytes in UTF-8


class LengthBound(NamedTuple):
    """A text of n bytes becomes at least n / bytes_per_token tokens.

    counts_spaces: False if the tokenizer may drop white space. White space is then not counted in n.
    """

    bytes_per_token: int
    counts_spaces: bool

    def fewest_tokens(self, text: str) -> int:
        counted = text if self.counts_spaces else "".join(text.split())
        size = len(counted) if counted.isascii() else len(counted.encode("utf-8", "surrogatepass"))
        return -(-size // self.bytes_per_token)

    @classmethod
    def of(cls, backend: Backend) -> Self | None:
        """The bound of a tokenizer. None if the tokenizer may drop text or make one token of a text of any length, or
        if that is not known."""
        normalizer, splitter = _state(backend.normalizer), _state(backend.pre_tokenizer)
        normalizer_effect, splitter_keeps_spaces = _normalizer_effect(normalizer), _splitter_effect(splitter)
        if normalizer_effect is None or splitter_keeps_spaces is None:
            return None
        factor, normalizer_keeps_spaces = normalizer_effect
        is_byte_level = "ByteLevel" in _kinds(normalizer) | _kinds(splitter)
        longest = _longest_token(backend, is_byte_level)
        if longest is None:
            return None
        added = backend.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        return cls(longest * factor, normalizer_keeps_spaces and splitter_keeps_spaces and not strips)


def _state(component: Any) -> Mapping[str, Any] | None:
    """The description of a normalizer or pre-tokenizer, as in tokenizer.json."""
    return None if component is None else json.loads(component.__getstate__())


def _steps(state: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The component and, if it is a sequence, its parts."""
    if state is None:
        return []
    parts = state.get("normalizers") or state.get("pretokenizers") or []
    return [state, *(step for part in parts for step in _steps(part))]


def _kinds(state: Mapping[str, Any] | None) -> set[str]:
    return {step["type"] for step in _steps(state)}


def _normalizer_effect(state: Mapping[str, Any] | None) -> tuple[int, bool] | None:
    """(the factor by which the number of bytes can shrink, whether white space is kept). None if text can be lost."""
    factor, keeps_spaces = 1, True
    for step in _steps(state):
        kind = step["type"]
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            factor *= _NORMAL_FORM_FACTOR
        elif kind == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            if not pattern or not content:
                return None
            factor *= max(1, -(-len(pattern.encode()) // len(content.encode())))
        elif kind == "Strip":
            keeps_spaces = False
        elif kind not in ("Sequence", "Prepend", "ByteLevel"):
            return None
    return factor, keeps_spaces


def _splitter_effect(state: Mapping[str, Any] | None) -> bool | None:
    """Whether a pre-tokenizer keeps white space, or None if it may drop other text."""
    keeps_spaces = True
    for step in _steps(state):
        kind = step["type"]
        if kind in ("Whitespace", "WhitespaceSplit"):
            keeps_spaces = False
        elif kind in ("Split", "Punctuation"):
            if step["behavior"] == "Removed":
                return None
        elif kind not in ("Sequence", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts"):
            return None
    return keeps_spaces


def _longest_token(backend: Backend, is_byte_level: bool) -> int | None:
    """The length of the longest token in bytes. None if the model has no tokens for some text: it then drops that text
    or merges it into one unknown token."""
    model, vocab = backend.model, backend.get_vocab(with_added_tokens=False)
    has_all_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if type(model).__name__ == "BPE":
        affixes = bool(model.continuing_subword_prefix or model.end_of_word_suffix)
        single_unknowns = model.unk_token in vocab and not model.fuse_unk
        complete = (model.byte_fallback and has_all_bytes) or single_unknowns
        complete = complete or (is_byte_level and BYTE_OF_CHARACTER.keys() <= vocab.keys())
        if affixes or not complete:
            return None
    elif type(model).__name__ == "Unigram":
        if not (has_all_bytes and json.loads(model.__getstate__()).get("byte_fallback")):
            return None
    else:
        return None
    # In GPT-2's alphabet, each character of a token stands for one byte.
    longest = max((len(token) if is_byte_level else len(token.encode()) for token in vocab), default=1)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    if (normalizer := backend.normalizer) is not None:
        added += [normalizer.normalize_str(content) for content in added]
    return max(longest, _LONGEST_CHARACTER, *(len(content.encode()) for content in added), 1)
